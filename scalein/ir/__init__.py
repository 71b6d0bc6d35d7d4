"""What to compute: immutable typed values and pure passes over them; no I/O."""
