"""Streams: a flow inside Structured Streaming, with a state of our own."""
