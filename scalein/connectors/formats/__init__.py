"""How files are read: one class a format, with what its statistics and malformed records need."""
