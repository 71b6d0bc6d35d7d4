"""Durable bytes by name: the seam to file systems, checked JSON, failpoints."""
