"""Where rows go: files written exactly once, callbacks, memory, the console."""
