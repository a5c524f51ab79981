"""A balancer on the client's side, and a steady load through it: nothing is asked twice, all is counted."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

CHECK_INTERVAL_S = 0.1
CHECK_TIMEOUT_S = 2.0


class RoundRobin(httpx.BaseTransport):
    """Requests go to the gateways in turn, to those that report ready.

    Like any balancer it takes another one when a connection is refused, since nothing was sent then.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._ready = dict.fromkeys(self._urls, True)
        self._turns = itertools.count()
        self._transport = httpx.HTTPTransport()
        self._ended = threading.Event()
        self._checks = threading.Thread(target=self._check, name="balancer")
        self._checks.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        turn = next(self._turns)
        inturn = [self._urls[(turn + step) % len(self._urls)] for step in range(len(self._urls))]
        for url in sorted(inturn, key=lambda url: not self._ready[url]):
            request.url = request.url.copy_with(host=url.host, port=url.port)
            try:
                return self._transport.handle_request(request)
            except httpx.ConnectError as error:
                refused = error
        raise refused

    def close(self) -> None:
        self._ended.set()
        self._checks.join()
        self._transport.close()

    def _check(self) -> None:
        with httpx.Client(trust_env=False, timeout=CHECK_TIMEOUT_S) as client:
            while not self._ended.wait(CHECK_INTERVAL_S):
                for url in self._urls:
                    try:
                        answer = client.get(url.join("/health/ready"), headers={"Connection": "close"})
                        self._ready[url] = answer.status_code == httpx.codes.OK
                    except httpx.HTTPError:
                        self._ready[url] = False


@dataclass
class Load:
    """What became of the requests so far."""

    num_answers: Counter[str] = field(default_factory=Counter)  # by kind
    failures: list[str] = field(default_factory=list)


Ask = Callable[[openai.OpenAI], None]


@contextmanager
def steady_load(urls: Sequence[str], kinds: dict[str, Ask], pause_s: float) -> Iterator[Load]:
    """One thread per kind asks again and again, `pause_s` after each answer; no request is repeated."""
    load, ended = Load(), threading.Event()
    transport = RoundRobin(urls)
    http_client: Any = httpx.Client(transport=transport, trust_env=False)  # openai also has a fork of it
    client = openai.OpenAI(
        base_url="http://balanced/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=http_client,
    )

    def ask_on(kind: str, ask: Ask) -> None:
        while not ended.is_set():
            try:
                ask(client)
            except Exception as error:  # whatever it is: it is counted, and the test names it
                load.failures.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                load.num_answers[kind] += 1
            ended.wait(pause_s)

    threads = [threading.Thread(target=ask_on, args=each, name=f"load {each[0]}") for each in kinds.items()]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        client.close()
        transport.close()


def read_stream(stream: Any) -> str:
    """The text of a streamed answer.

    Raises:
        AssertionError: it broke off.
    """
    text, finish_reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
    assert finish_reason is not None, f"the stream broke off after {text!r}"
    return text
