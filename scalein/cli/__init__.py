"""The command line: `main` parses, each verb is a file beside it."""
