"""Parts of `benchmarks/soak_store.py`."""
