"""Large media on their way to encoders: whole, in turns, and no longer than an encoder reads."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.routes import media

CONTENT = bytes(range(256)) * (8 << 12)  # 8 MiB: more than sockets hold
HASH, HOLDER = MmHash("a" * 64), RequestId("r")


@pytest.fixture
def path(system: System) -> Iterator[str]:
    """Where the content is."""
    cache = system.gateway.media_cache
    yield f"/internal/media/{cache.keep_media(HASH, CONTENT, HOLDER)}"
    cache.release_media(HASH, HOLDER)


class SlowEncoder:
    """Asks, and reads no further than the answer's head."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, system: System, path: str) -> "SlowEncoder":
        connection = await asyncio.open_connection("127.0.0.1", system.gateway.settings.port, limit=1 << 10)
        connection[1].write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await connection[0].readline()).startswith(b"HTTP/1.1 200")
        return cls(*connection)

    async def read_all(self) -> bytes:
        await self.reader.readuntil(b"\r\n\r\n")
        content = await self.reader.readexactly(len(CONTENT))
        self.writer.close()
        return content


async def test_the_bytes_are_those_that_were_sent(system: System, path: str) -> None:
    answer = await system.http.get(path)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["content-length"] == str(len(CONTENT))
    assert answer.headers["cache-control"] == "no-store"
    system.gateway.media_cache.release_media(HASH, HOLDER)
    assert (await system.http.get(path)).status_code == 404


@pytest.mark.parametrize("system", [{"max_media_sends": 1}], indirect=True)
async def test_they_go_out_in_turns(system: System, path: str) -> None:
    first = await SlowEncoder.ask(system, path)
    async with asyncio.TaskGroup() as group:
        second = group.create_task(system.http.get(path))
        assert (await system.http.get("/health/live")).status_code == 200
        assert not second.done()
        assert await first.read_all() == CONTENT
    assert second.result().content == CONTENT


@pytest.mark.parametrize("system", [{"max_media_sends": 1}], indirect=True)
async def test_an_encoder_is_told_to_come_back(
    system: System, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "WAIT_S", 0.05)
    first = await SlowEncoder.ask(system, path)
    answer = await system.http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "media_busy")
    assert answer.headers["retry-after"]
    assert await first.read_all() == CONTENT
    assert (await system.http.get(path)).status_code == 200


@pytest.mark.parametrize("system", [{"max_media_sends": 1}], indirect=True)
async def test_an_encoder_that_reads_nothing_keeps_no_place(
    system: System, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "PIECE_TIMEOUT_S", 0.1)
    first = await SlowEncoder.ask(system, path)
    answer: httpx.Response = await system.http.get(path)
    assert answer.content == CONTENT
    with pytest.raises(asyncio.IncompleteReadError):
        await first.read_all()
    await until(first.reader.at_eof)
    first.writer.close()
