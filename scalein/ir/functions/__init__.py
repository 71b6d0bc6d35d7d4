"""Every function that expressions may call."""
