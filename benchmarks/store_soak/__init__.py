"""Part of `soak_store.py`. workers: the processes that write, read and compare tensors."""
