"""Parts of `benchmarks/handover.py`: the ways, the processes that walk them, the plot."""
