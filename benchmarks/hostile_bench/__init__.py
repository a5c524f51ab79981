"""Parts of `hostile.py`.

processes   the system's processes: memory, ends, event loops
fuzzing     hostile values in every field of every endpoint, for minutes
"""
