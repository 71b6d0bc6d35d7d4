"""Where batches come from and go to; knows Arrow, not dataflow."""
