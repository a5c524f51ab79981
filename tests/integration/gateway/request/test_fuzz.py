"""Whatever comes over the socket: a documented answer in OpenAI's format, and the service goes on.

The seed is printed; `--hypothesis-seed` runs the same requests again.
"""

import asyncio
import base64
import contextlib
import copy
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
from hypothesis import strategies as st

from tests.contract.test_runbook import described
from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.header_bombs import gif_with_profile, webp_animation
from tests.support.gateway.process import environment, process_of
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.waiting import free_port, until_async
from triptych_common.bus import AsyncBus
from triptych_common.runtime.media_settings import IMAGE_FORMATS

CHAT_PATH = "/v1/chat/completions"
FORMATS = tuple(each for each in IMAGE_FORMATS if each != "QOI")  # which is written in colors alone
IMAGES = [
    *(image_bytes(size=(5, 4), image_format=name) for name in FORMATS),
    image_bytes(size=(3000, 1), image_format="GIF"),
    image_bytes(size=(1001, 1000)),  # more pixels than are allowed
    gif_with_profile()[:20_000],
    webp_animation()[:3000],
    b"\x89PNG\r\n\x1a\n",
    b"",
]


@dataclass(frozen=True)
class FuzzedRequest:
    """Request as it goes over the socket, before `Connection: close` is added."""

    method: bytes
    path: bytes
    headers: tuple[bytes, ...]
    body: bytes

    @property
    def raw(self) -> bytes:
        line = self.method + b" " + self.path + b" HTTP/1.1"
        return b"\r\n".join([line, b"Host: x", *self.headers, b"Connection: close", b"", self.body])


def _image(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {}]}'}}
VALID: list[dict[str, Any]] = [
    {"messages": [_user("x")]},
    {"messages": [_user("x")], "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [_user([{"type": "text", "text": "x"}, _image(IMAGES[0])])]},
    {"messages": [_user([_image(IMAGES[1]), _image(IMAGES[2]), "y"])], "stream": True},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            _user([_image(IMAGES[0]), _image(IMAGES[0])]),
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "n": 2,
        "stop": ["a"],
        "logit_bias": {"5": 1.5},
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


def _deep(depth: int) -> Any:
    value: Any = {}
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _damaged(content: bytes, at: int, byte: int) -> dict[str, Any]:
    return _image(content[:at] + bytes([byte]) + content[at + 1 :])


PARTS = [
    {"type": "image_url"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}},
    {"type": "image_url", "image_url": {"url": "data:,x"}},
    {"type": "image_url", "image_url": "https://127.0.0.1/a.png"},
    {"type": "image_url", "image_url": {"url": "http://[::1]:6379/?x#y"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
    {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "a" * 64},
    {"type": "text", "text": "x", "image_url": {"url": "data:"}},
    {"type": "text", "text": "<|image_pad|>"},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode()}},
]
MEDIA_PARTS = (
    st.sampled_from(IMAGES).map(_image)
    | st.builds(_damaged, st.sampled_from(IMAGES), st.integers(0, 300), st.integers(0, 255))
    | st.binary(max_size=64).map(_image)
    | st.sampled_from(PARTS).map(copy.deepcopy)
)
NUMBERS = [0, -1, 129, 2**31, 2**63, 2**64, -(2**64), 10**300, 10**4000, 1e308, float("nan"), float("inf")]
TEXTS = ["", "\x00", "\ud800", "\U0001f600" * 100, "x" * 40_000, "../../x", "data:" + "é" * 9000, MODEL]
CONTAINERS = [[], {}, [[]], {"": {}}, [None] * 2000, {str(n): n for n in range(2000)}, [[]] * 60_000]
ODD_VALUES = (
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
    | st.text(max_size=20)
    | st.sampled_from(CONTAINERS).map(copy.deepcopy)
    | st.integers(2, 400).map(_deep)
    | MEDIA_PARTS
)
FIELDS = st.text(max_size=8) | st.sampled_from(
    [
        *("model", "messages", "stream", "n", "max_tokens", "stop", "logit_bias", "tools", "seed"),
        *("mm_processor_kwargs", "media_io_kwargs", "vllm_xargs", "cache_salt", "ec_transfer_params"),
        *("request_id", "truncate_prompt_tokens", "use_beam_search", "response_format", "prompt_logprobs"),
        *("prompt", "input", "query", "documents", "echo", "logprobs", "prompt_embeds", "encoding_format"),
        *("metadata", "user", "chat_template", "chat_template_kwargs", "arguments", "role", "content"),
    ]
)
METHODS = st.sampled_from([b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"TRACE"])
PATHS = st.sampled_from(
    [
        *(b"/health/live", b"/health/ready", b"/metrics", b"/v1/models", b"/v1/models/x%00y", b"/", b"//"),
        *(b"/v1/models/fake-vl", b"/internal/media/x", b"/internal/media/%2e%2e/x", b"/v1/chat/completions/"),
        *(
            b"/%ff%fe",
            b"/?" + b"a=b&" * 1000,
            b"/v1/chat/completions?stream=true",
            b"/" + b"a" * 30_000,
            b"*",
        ),
    ]
)
HEADERS = st.sampled_from(
    [
        *(b"Authorization: Bearer x", b"Authorization: \xff\xfe", b"Authorization: Basic " + b"A" * 9000),
        *(b"Content-Type: application/json", b"Content-Type: text/plain; charset=\xff", b"Content-Type:"),
        *(b"traceparent: 00-zz", b"X-Request-Id: \x7f", b"Accept-Encoding: br", b"Expect: 100-continue"),
        *(b"Upgrade: websocket", b"X: " + b"y" * 100_000, b"Host: [", b"Cookie: " + b"a=b;" * 2000),
        b"Content-Encoding: gzip",
    ]
)
FAULTY_FRAMINGS = ["both", "none", "short", "long", "negative", "odd"]
FRAMINGS = st.sampled_from(["length"] * 6 + ["chunked"] * 3 + FAULTY_FRAMINGS)
INSERTED = [b"\\", b'"', b"\x00", b"[" * 300, b"\xff", b"9" * 5000]


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        each = stack.pop()
        pairs = list(each.items() if isinstance(each, dict) else enumerate(each))
        found += [(each, key) for key, _ in pairs]
        stack += [child for _, child in pairs if isinstance(child, (dict, list)) and len(child) < 100]
    return found


def _mutate(draw: st.DrawFn, body: dict[str, Any]) -> None:
    spots = _spots(body)
    if not spots:
        return
    container, key = spots[draw(st.integers(0, len(spots) - 1))]
    kind = draw(st.sampled_from(["replace", "delete", "add", "insert", "repeat"]))
    if kind == "replace":
        container[key] = draw(ODD_VALUES)
    elif kind == "delete":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[draw(FIELDS)] = draw(ODD_VALUES)
    elif isinstance(container, list):
        container.insert(key, draw(MEDIA_PARTS) if kind == "insert" else copy.deepcopy(container[key]))
    else:
        body[draw(FIELDS)] = draw(ODD_VALUES)


def _damage(draw: st.DrawFn, raw: bytes) -> bytes:
    at = draw(st.integers(0, len(raw)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "key twice", "tail"]))
    if kind == "cut":
        return raw[:at]
    if kind == "flip":
        return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
    if kind == "insert":
        return raw[:at] + draw(st.sampled_from(INSERTED)) + raw[at:]
    if kind == "tail":
        return raw + draw(st.sampled_from([b" ", b"}", b"x", b"\x00" * 100]))
    return raw.replace(b"{", b'{"model": "other", "messages": [], ', 1)


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _framed(draw: st.DrawFn, body: bytes) -> tuple[tuple[bytes, ...], bytes]:
    length = b"Content-Length: %d" % len(body)
    chunked = b"Transfer-Encoding: chunked"
    framing = draw(FRAMINGS)
    if framing in ("chunked", "both"):
        headers = (chunked,) if framing == "chunked" else (length, chunked)
        return headers, _chunked(body, draw(st.sampled_from([7, 1000, 1 << 20])))
    other: dict[str, tuple[bytes, ...]] = {
        "none": (),
        "short": (b"Content-Length: %d" % (len(body) // 2),),
        "long": (b"Content-Length: %d" % (len(body) + 5),),
        "negative": (b"Content-Length: -5",),
        "odd": (b"Content-Length: 0x10",),
    }
    return other.get(framing, (length,)), body


TEXT_PATHS = st.sampled_from(
    [b"/v1/completions", b"/tokenize", b"/v1/chat/completions/batch", b"/v1/embeddings", b"/rerank"]
)


@st.composite
def requests(draw: st.DrawFn) -> FuzzedRequest:
    """A request that is mostly one for chat, with up to four faults in its JSON, its bytes, or around it."""
    body = {"model": MODEL, **copy.deepcopy(draw(st.sampled_from(VALID)))}
    for _ in range(draw(st.integers(0, 4))):
        _mutate(draw, body)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        raw = _damage(draw, raw)
    framing, raw = _framed(draw, raw)
    place = draw(st.integers(0, 9))
    is_elsewhere = place == 0
    path = draw(TEXT_PATHS) if place in (1, 2) else CHAT_PATH.encode()
    return FuzzedRequest(
        method=draw(METHODS) if is_elsewhere else b"POST",
        path=draw(PATHS) if is_elsewhere else path,
        headers=(*draw(st.just([]) | st.lists(HEADERS, max_size=2)), *framing),
        body=raw,
    )


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
