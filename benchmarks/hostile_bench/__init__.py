"""Parts of `hostile.py`.

processes   the system's processes: memory, ends, loops
given_back  what is held for requests, and how soon it is given back
vocabulary  the demo model with 150,000 tokens
fuzzing     hostile values in every field of every endpoint, for minutes
"""
