"""Sends cases to a server, by OpenAI's client."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from openai import OpenAI

from tests.support.real.bodies.case import Case
from tests.support.real.bodies.comparing import events_of, joined, shown
from tests.support.real.system import Server


@dataclass(frozen=True)
class Reply:
    """What came of one case. `raised`: the class of the client's exception; "": none."""

    status: int
    raised: str = ""
    content: Any = None  # of a good answer, as it is compared
    error: dict[str, Any] = field(default_factory=dict)


def ask(client: OpenAI, server: Server, case: Case) -> Reply:
    url = server.base_url.removesuffix("/v1") + case.path
    try:
        if case.sent is None:
            response = client.get(url, cast_to=httpx.Response)
        else:
            response = client.post(url, body=case.sent, cast_to=httpx.Response)
    except openai.APIStatusError as error:
        body = error.response.json() if error.response.content else {}
        fault = body.get("error", body) if isinstance(body, dict) else {}
        return Reply(error.status_code, type(error).__name__, error=fault if isinstance(fault, dict) else {})
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return Reply(response.status_code, content=joined(events_of(response.text)))
    return Reply(response.status_code, content=shown(response.json()) if response.content else None)


def ask_all(servers: Mapping[str, Server], cases: Mapping[str, Case]) -> dict[str, dict[str, Reply]]:
    """By server and case. Servers are asked at once; each gets one request at a time, so that none is batched
    with others: what an engine computes differs in its last digits with what it computes beside it."""

    def ask_one(server: Server) -> dict[str, Reply]:
        with server.openai as client:
            return {name: ask(client, server, case) for name, case in cases.items()}

    with ThreadPoolExecutor(len(servers)) as pool:
        return dict(zip(servers, pool.map(ask_one, servers.values()), strict=True))
