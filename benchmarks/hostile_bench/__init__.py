"""Parts of `hostile.py`.

processes   the system's processes: memory, ends, event loops
given_back  what is held for requests, and how soon it is given back
fuzzing     hostile values in every field of every endpoint, for minutes
"""
