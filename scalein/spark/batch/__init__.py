"""Bounded flows inside Spark: whole flows over DataFrames, files read by the tasks."""
