"""Where a stage's rows go: output columns, groups, partitions."""
