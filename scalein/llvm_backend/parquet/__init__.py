"""Kernels that decode Parquet pages: headers, Snappy, dictionary indices."""
