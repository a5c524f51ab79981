"""Many uploads at once, each slow: what the gateway holds is bounded, and texts are answered meanwhile."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from PIL import ImageFile

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment, process_of
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.system import System
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus

MIB = 1 << 20
NUM_UPLOADS = 64
UPLOAD_BYTES = 20 * MIB
NUM_TURNS = 16  # in which each client sends its body
BOUND_BYTES = 512 * MIB
# Beside the bound: of each connection what the server reads ahead, allocators' rests, code that runs first.
OTHER_BYTES = 128 * MIB
LEFT_BYTES = 64 * MIB
TEXT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


def memory_bytes(pid: int, name: str) -> int:
    """Of a process: `VmRSS`, what it has now, or `VmHWM`, the most it ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


@dataclass
class Upload:
    """A client that sends a body with an image of its own, a part of it in each turn."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answer: asyncio.Task[tuple[int, dict[str, str], bytes]]
    pieces: list[bytes] = field(default_factory=list)

    @classmethod
    async def begin(cls, group: asyncio.TaskGroup, port: int, number: int) -> "Upload":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        image = image_bytes() + number.to_bytes(4, "little")
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,HERE"}},
                            {"type": "text", "text": "what is it?"},
                        ],
                    }
                ],
            }
        ).encode()
        before, after = body.split(b"HERE")
        start = base64.b64encode(image + bytes(-len(image) % 3))
        num_filler = UPLOAD_BYTES * 4 // 3 // 4 * 4 - len(start)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (
            len(before) + len(start) + num_filler + len(after)
        )
        filler = b"A" * (num_filler // NUM_TURNS)
        last = b"A" * (num_filler % NUM_TURNS)
        pieces = [head + before + start, *[filler] * (NUM_TURNS - 1), filler + last + after]
        return cls(number, reader, writer, group.create_task(read_answer(reader)), pieces)

    async def send(self, piece: bytes) -> None:
        """Unless the answer is there."""
        if not self.answer.done():
            self.writer.write(piece)
            await self.writer.drain()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


@asynccontextmanager
async def gateway(redis_url: str, run_dir: Path) -> AsyncIterator[tuple[int, httpx.AsyncClient, FakeEncoder]]:
    """The process' id, a client of it, and its encoder."""
    port = free_port()
    env = environment(redis_url, run_dir, port) | {
        "TRIPTYCH_MAX_MEDIA_IN_FLIGHT_BYTES": str(BOUND_BYTES),
        "TRIPTYCH_BODY_TIMEOUT_S": "60",
    }
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakeEncoder(bus).running() as encoder,
        FakePrefillDecode().running(bus),
        process_of(env) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):

        async def is_ready() -> bool:
            try:
                return (await http.post("/v1/chat/completions", json=TEXT)).status_code == 200
            except httpx.TransportError:
                return False

        await until_async(is_ready)
        yield process.pid, http, encoder


async def send_in_turns(uploads: list[Upload], http: httpx.AsyncClient) -> None:
    """Each sends a part, and a text is answered, until all is sent."""
    for turn in range(NUM_TURNS + 1):
        async with asyncio.TaskGroup() as sending:
            for upload in uploads:
                sending.create_task(upload.send(upload.pieces[turn]))
            text = sending.create_task(http.post("/v1/chat/completions", json=TEXT))
        assert text.result().status_code == 200, text.result().text


async def test_many_slow_uploads(redis_url: str, tmp_path: Path) -> None:
    async with gateway(redis_url, tmp_path) as (pid, http, encoder):
        port = http.base_url.port or 0
        async with asyncio.TaskGroup() as group:  # so that memory has been used and given back before
            first = await Upload.begin(group, port, NUM_UPLOADS)
            await send_in_turns([first], http)
        assert first.answer.result()[0] == 200
        before = memory_bytes(pid, "VmRSS")
        encoder.before_start.clear()
        async with asyncio.TaskGroup() as group:
            uploads = [await Upload.begin(group, port, number) for number in range(NUM_UPLOADS)]
            await send_in_turns(uploads, http)
            num_held = BOUND_BYTES // UPLOAD_BYTES
            await until(lambda: sum(upload.answer.done() for upload in uploads) >= NUM_UPLOADS - num_held, 20)
            grown = memory_bytes(pid, "VmHWM") - before
            encoder.before_start.set()
        answers = [upload.answer.result() for upload in uploads]
        for upload in (first, *uploads):
            upload.writer.close()

        def is_given_back() -> bool:  # the last request ends a moment after its answer
            return memory_bytes(pid, "VmRSS") - before <= LEFT_BYTES

        await until(is_given_back, 20)
    statuses = [status for status, _, _ in answers]
    assert statuses.count(200) + statuses.count(429) == NUM_UPLOADS, statuses
    assert num_held - 2 <= statuses.count(200) <= num_held, "an upload takes what its media are decoded"
    for status, headers, body in answers:
        if status == 429:
            assert json.loads(body)["error"]["code"] == "too_much_media"
            assert headers["retry-after"]
    assert grown <= BOUND_BYTES + OTHER_BYTES, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize("step", [61, 4096, 100_000])
@pytest.mark.parametrize("escapes", [False, True], ids=["as it comes", "put back"])
async def test_the_encoder_gets_the_bytes_that_were_sent(system: System, step: int, *, escapes: bool) -> None:
    """In whatever pieces the body comes; above `inline_media_bytes` or below."""
    contents = [image_bytes() + bytes(number % 251 for number in range(size)) for size in (0, 9000, 300_000)]
    parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in contents]
    raw = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [*parts, "x"]}]}).encode()
    raw = raw.replace(b"/", b"\\/") if escapes else raw

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(raw), step):
            yield raw[at : at + step]

    answer = await system.post_raw(pieces())
    assert answer.status_code == 200, answer.text
    assert sorted(system.encoder.media, key=len) == contents


async def test_no_pixel_is_decoded(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the encoder's work alone. The fake one reads the header, as the gateway does."""

    def load(image: ImageFile.ImageFile) -> None:
        raise AssertionError(f"{image.format} is decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    for image_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        url = data_url(image_bytes(size=(64, 64), image_format=image_format))
        assert (await system.ask([{"type": "image_url", "image_url": {"url": url}}])).choices
