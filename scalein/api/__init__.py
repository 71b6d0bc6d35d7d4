"""The face: flows, columns, windows, sources and sinks, as users write them."""
