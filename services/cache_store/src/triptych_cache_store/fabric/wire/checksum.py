"""Of an entry's bytes, taken on both sides while they travel: XXH3-128, an order of magnitude faster than the
network. It notices accidents of memory and network. It is no proof of who sent them
(docs/operations/security.md).
"""

import xxhash


class Checksum:
    """Grows chunk by chunk; lets go of the GIL."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: memoryview) -> None:
        self._hash.update(part)

    def digest(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()
