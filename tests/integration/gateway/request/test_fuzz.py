"""Whatever comes over the socket: a documented answer in OpenAI's format, and the service goes on.

The seed is printed; `--hypothesis-seed` runs the same requests again.
"""

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings

from tests.contract.test_runbook import described
from tests.integration.gateway.request.request_strategies import FuzzedRequest, requests
from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment, process_of
from tests.support.gateway.samples import MODEL
from tests.support.waiting import free_port, until_async
from triptych_common.bus import AsyncBus

NUM_REQUESTS = 300
ANSWER_LIMIT_S = 30
LOOK_INTERVAL_S = 0.01
# Everything that serves is there and well, so of the documented 5xx none has a reason to come.
ALLOWED_5XX: frozenset[tuple[int, str]] = frozenset()
CODES = described()


@dataclass
class Watchdog:
    """Asks `/health/live` all the time: the longest wait is about the longest stop of the event loop."""

    port: int
    longest_s: float = 0.0
    num_looks: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        thread = threading.Thread(target=self._watch, name="watchdog")
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as live:
            while not self._end.wait(LOOK_INTERVAL_S):
                began = time.monotonic()
                live.request("GET", "/health/live")
                live.getresponse().read()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.num_looks += 1


@asynccontextmanager
async def gateway_process(redis_url: str, run_dir: Path) -> AsyncIterator[int]:
    """The real service between the fakes; yields its port."""
    port = free_port()
    env = environment(redis_url, run_dir, port) | {
        "TRIPTYCH_BODY_TIMEOUT_S": "0.5",
        "TRIPTYCH_HEADER_TIMEOUT_S": "0.5",
        "TRIPTYCH_INSTANCE_GRACE_S": "0.2",
        "TRIPTYCH_MAX_IMAGE_PIXELS": "1000000",
        "TRIPTYCH_INLINE_MEDIA_BYTES": "1000",
        # A damaged URL may name any host of the world: none is asked.
        "TRIPTYCH_FETCH_ALLOWED_HOSTS": '["nowhere.invalid"]',
    }
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakePrefillDecode().running(bus),
        FakeEncoder(bus).running(),
        process_of(env),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        await until_async(lambda: is_ready(client))
        yield port


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        answer = await client.get("/health/ready")
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and bool(answer.json()["encoder_available"])


def send(port: int, raw: bytes) -> tuple[int, bytes] | None:
    """Status and body of the answer; None: closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_LIMIT_S) as client:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            client.sendall(raw)
        answer = http.client.HTTPResponse(client, method=raw.split(b" ", 1)[0].decode())
        try:
            answer.begin()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            return None


def check(request: FuzzedRequest, answer: tuple[int, bytes] | None) -> str:
    """One line about a good answer."""
    if answer is None:
        # An answer may be lost where the gateway closes with bytes unread that were not announced to it.
        assert request.headers != (b"Content-Length: %d" % len(request.body),), "no answer"
        return "closed"
    status, body = answer
    if status < 400 or request.method == b"HEAD":
        assert status < 500
        return str(status)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert str(status) in CODES[error["code"]] or error["code"] == "http_error", error
    assert status < 500 or (status, error["code"]) in ALLOWED_5XX, error
    return f"{status} {error['code']}"


def neighbour(port: int) -> None:
    answer = send(port, plain({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}))
    assert answer is not None
    assert answer[0] == 200, answer


def plain(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    headers = (b"Content-Length: %d" % len(raw),)
    return FuzzedRequest(b"POST", b"/v1/chat/completions", headers, raw).raw


def fuzz(port: int, seed: int, outcomes: Counter[str]) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=NUM_REQUESTS,
        deadline=None,
        database=None,
        print_blob=True,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests())
    def run(request: FuzzedRequest) -> None:
        outcomes[check(request, send(port, request.raw))] += 1
        neighbour(port)

    run()


@pytest.mark.slow
async def test_no_request_breaks_the_gateway(
    redis_url: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    wanted = pytestconfig.getoption("--hypothesis-seed", default=None)
    seed = int(wanted) if wanted and wanted != "random" else random.SystemRandom().getrandbits(32)
    outcomes: Counter[str] = Counter()
    print(f"--hypothesis-seed={seed}")
    record_property("hypothesis_seed", seed)
    async with gateway_process(redis_url, tmp_path) as port:
        with Watchdog(port).watching() as watchdog:
            await asyncio.to_thread(fuzz, port, seed, outcomes)
        assert watchdog.num_looks
    record_property("longest_stop_s", round(watchdog.longest_s, 3))
    print(f"longest stop of the event loop: {watchdog.longest_s:.3f} s; answers: {outcomes}")
    assert outcomes["200"], "no request was served at all: they are all faulty"
    assert len(outcomes) > 10, outcomes
