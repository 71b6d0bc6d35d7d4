"""The command line: `main` parses, each command is a file beside it."""
