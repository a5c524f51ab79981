"""Checksum of an entry's bytes, computed on both sides during a transfer.

XXH3-128 is an order of magnitude faster than the network. It detects accidents, not forgery
(docs/operations/security.md).
"""

import xxhash


class Checksum:
    """Incremental checksum; releases the GIL."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: memoryview) -> None:
        self._hash.update(part)

    def digest(self) -> bytes:
        """Digest of the bytes so far: 16 bytes."""
        return self._hash.digest()
