"""The queue of files that wait for their encode."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.waiting import until
from triptych_gateway.files import encode_ahead
from triptych_gateway.files.encode_ahead import EncodeAhead
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.content_parts import KnownFile


async def test_a_file_that_is_deleted_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the encoders are busy."""
    served: list[str] = []
    no_part: Any = None
    ahead = EncodeAhead(
        orders=no_part,
        final_acks=no_part,
        view=no_part,
        metrics=GatewayMetrics(),
        timeout_s=1,
        video_piece_rows=0,
    )

    async def is_idle(self: EncodeAhead, digest: str) -> bool:
        return False

    def targets(self: EncodeAhead, file: KnownFile) -> list[Any]:
        served.append(file.file_id)
        return [(None, "digest", None)]

    monkeypatch.setattr(encode_ahead, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(EncodeAhead, "_is_idle", is_idle)
    monkeypatch.setattr(EncodeAhead, "_targets", targets)
    with ThreadPoolExecutor(1) as threads:
        running = asyncio.get_running_loop().create_task(ahead.run())
        for file_id in ("file-1", "file-2"):
            ahead.add_file(KnownFile(file_id, 1, "0" * 64, (), None, bytes, threads), "")
        await until(lambda: served == ["file-1"])
        ahead.forget_file("file-1")
        await until(lambda: served == ["file-1", "file-2"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
