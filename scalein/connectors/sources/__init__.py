"""Where rows come from: files and folders, streams, generators."""
