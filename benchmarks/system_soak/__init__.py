"""Parts of `benchmarks/soak_system.py`: the systems that it wears out, who does it, and the report."""
