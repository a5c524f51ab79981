"""Uploaded file for a request: its record, and a reader of its bytes.

As a rule a request that names it needs no bytes: identity, kind and size were found at the upload.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from triptych_common.protocol.messages import Modality
from triptych_gateway.request.image_header import ImageHeader


@dataclass(frozen=True, slots=True)
class KnownFile:
    """Uploaded file whose bytes are read at each call; none are kept."""

    file_id: str
    num_bytes: int
    media_digest: str  # common `domain.hashing.media_digest` of its bytes
    modalities: tuple[Modality, ...]  # that it can be; the likeliest first
    image: ImageHeader | None  # of an image
    read: Callable[[], bytes] = field(repr=False)
    """Reader of the file's bytes. It blocks on the disk, so call it in a thread.

    Raises:
        RequestError: 404 it was deleted meanwhile; 503 it cannot be read.
    """
    threads: Executor = field(repr=False)

    async def fetch(self) -> bytes:
        """Read the bytes in a thread of its own pool."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.read)
