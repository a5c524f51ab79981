"""Random ids from the operating system, fetched many at a time: a call takes 5 µs, and a request needs
several.

vLLM seeds Python's own generator alike in each of its workers: their ids would be the same.
"""

import os
from collections import deque

ID_BYTES = 16
_NUM_AT_ONCE = 256
_unused: deque[bytes] = deque()
os.register_at_fork(after_in_child=_unused.clear)  # parent and child would hand out the same ones


def random_id() -> bytes:
    """Return 16 random bytes, unique over processes. Callable from any thread."""
    while True:
        try:
            return _unused.pop()
        except IndexError:
            drawn = os.urandom(ID_BYTES * _NUM_AT_ONCE)
            _unused.extend(drawn[at : at + ID_BYTES] for at in range(0, len(drawn), ID_BYTES))
