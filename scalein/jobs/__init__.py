"""Jobs: flows that run continuously, with checkpoints, on one machine."""
