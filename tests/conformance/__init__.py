"""Conformance: every flow shape of one list by `collect`, as a job and as a Spark stream; the README's support matrix.

`python -m tests.conformance` writes the matrix.
"""
