"""Compiled kernels at work: prepared, specialised to their input, bound to batches, called, and their output taken."""
