"""`python -m tests.conformance` runs all shapes, and writes the support matrix into the README."""

from tests.conformance.matrix import write_readme

write_readme()
