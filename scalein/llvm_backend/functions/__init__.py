"""Lowerings of scalar functions, a module for each kind of values."""
