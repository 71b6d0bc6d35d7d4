"""Durable bytes by name: file systems, concurrent reads, checked JSON and failpoints."""
