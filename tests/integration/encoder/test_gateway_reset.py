"""A gateway that dies while an encoder connects to it for its media."""

import asyncio
import time
from typing import Any

import pytest

from tests.support.faults.resets import LOOPS, Asyncio, Uvloop, resetting_server, show_connections, wait_reset
from tests.support.message_samples import encode_job
from triptych_common.protocol.codec import Envelope
from triptych_encoder.jobs.media_source import MediaGoneError, MediaSource, new_media_client


@pytest.mark.parametrize("loop", LOOPS)
def test_its_media_are_gone(loop: type[Uvloop | Asyncio]) -> None:
    async def reset(transport: asyncio.Transport, protocol: Any) -> None:
        server.reset()
        await wait_reset(transport, protocol)

    async def fetch() -> None:
        job = encode_job(media_num_bytes=10, media_url=f"{server.url}/internal/media/token")
        envelope = Envelope(job, blob=None, remaining_ms=None, received_at=time.monotonic())
        async with new_media_client() as client:
            with pytest.raises(MediaGoneError):
                await MediaSource(client, max_bytes=100).fetch(job, envelope)

    with resetting_server(answers=False) as server, asyncio.Runner(loop_factory=loop) as runner:
        show_connections(runner, reset)
        runner.run(fetch())
