"""When and where kernels run: batches, tasks, threads."""
