"""One streamed chat request with the time of every token, at little cost per token."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 300.0
_DATA = b"data:"


@dataclass(frozen=True)
class Question:
    """One request; `kind` groups its answers in the figures."""

    kind: str
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int
    label: str = ""  # the same in all systems: their answers to it are compared; empty: not compared
    is_timed: bool = True  # False: it prepares the next one

    def body(self, model: str) -> dict[str, Any]:
        """Body for OpenAI's API, with vLLM's options for a fixed length and for token ids."""
        return {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@dataclass
class Answer:
    """Outcome of a question, in seconds of the monotonic clock."""

    kind: str
    label: str
    start: float
    is_timed: bool = True
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # one for each event that brought tokens
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    encode_ms: float | None = None  # the serial proxy's own figure
    request_id: str = ""
    status: int = 0  # of HTTP; 0: no answer came
    retry_after_s: float | None = None  # as the server says

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token; NaN without one."""
        return (self.times[0] - self.start) * 1e3 if self.times else float("nan")

    @property
    def e2e_ms(self) -> float:
        return (self.end - self.start) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between two events with tokens."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first; NaN for a single one."""
        num_further = len(self.token_ids) - 1
        return (self.times[-1] - self.times[0]) * 1e3 / num_further if num_further > 0 else float("nan")


@dataclass(frozen=True)
class Endpoint:
    """Server of OpenAI's API, with a session to it."""

    base_url: str
    model: str
    session: aiohttp.ClientSession


def new_session(timeout_s: float = REQUEST_TIMEOUT_S) -> aiohttp.ClientSession:
    """HTTP session without a limit of connections, since closed loops limit themselves."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=1 << 20,
    )


async def ask(endpoint: Endpoint, question: Question) -> Answer:
    """Send one request; a failure is in the answer's `error`, never an exception."""
    body = json.dumps(question.body(endpoint.model)).encode()
    answer = Answer(question.kind, question.label, time.monotonic(), question.is_timed)
    try:
        async with endpoint.session.post(
            f"{endpoint.base_url}/chat/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            answer.request_id = response.headers.get("x-request-id", "")
            encode_ms = response.headers.get("x-encode-ms")
            retry_after = response.headers.get("retry-after")
            answer.status = response.status
            answer.retry_after_s = float(retry_after) if retry_after else None
            answer.encode_ms = float(encode_ms) if encode_ms else None
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
            else:
                async for line in response.content:
                    _take_line(answer, line)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.monotonic()
    if not answer.error and len(answer.token_ids) != question.max_tokens:
        answer.error = f"{len(answer.token_ids)} tokens came instead of {question.max_tokens}"
    return answer


def _take_line(answer: Answer, line: bytes) -> None:
    """Apply one line of server-sent events."""
    if not line.startswith(_DATA):
        return
    payload = line[len(_DATA) :].strip()
    if payload == b"[DONE]":
        return
    event = json.loads(payload)
    if "error" in event:
        answer.error = json.dumps(event["error"])[:300]
        return
    for choice in event.get("choices", ()):
        token_ids = choice.get("token_ids")
        if token_ids:
            answer.times.append(time.monotonic())
            answer.token_ids += token_ids
