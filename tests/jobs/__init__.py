"""Jobs: the same rows as `collect`, whatever happens on the way."""
