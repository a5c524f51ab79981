"""Sends hostile requests to a gateway and notes what is no answer that a caller should get."""

import asyncio
import io
import json
import random
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp
import yarl

from tests.support.hostile.fields import HostileRequest
from triptych_gateway.endpoints.local_endpoints import UI_EVENTS

MAX_ERROR_BYTES = 8192
MAX_NOTED = 4000
HANG_UP_SHARE = 0.1


@dataclass(frozen=True)
class Sent:
    """One request that was answered, or not."""

    began_at: float  # time.time()
    ended_at: float
    name: str
    num_bytes: int
    status: int  # 0: the connection was closed without an answer; -1: the caller hung up

    def __str__(self) -> str:
        return f"{self.name}, {self.num_bytes} B: {self.status} in {self.ended_at - self.began_at:.2f} s"


@dataclass
class FuzzOutcome:
    """Statuses, fields and faults that a fuzzing run has seen."""

    statuses: Counter[int] = field(default_factory=Counter)
    by_path: Counter[str] = field(default_factory=Counter)
    fields: set[tuple[str, str, str | int]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    recent: deque[Sent] = field(default_factory=lambda: deque(maxlen=MAX_NOTED))
    slowest: Sent | None = None

    def at(self, moment: float, seconds: float) -> list[str]:
        """Return which requests were under way when the loop stopped, the latest first."""
        return [
            str(each) for each in self.recent if each.began_at < moment and each.ended_at > moment - seconds
        ][::-1]


async def fuzz(
    base_url: str,
    requests: Iterable[HostileRequest],
    *,
    seed: int,
    num_at_once: int = 4,
    timeout_s: float = 120.0,
    key: str | None = None,
    outcome: FuzzOutcome | None = None,
) -> FuzzOutcome:
    """Send `requests`, `num_at_once` at a time; of some the caller hangs up early.

    Args:
        base_url: of the gateway, without a path.
        seed: of who hangs up, and when.
    """
    outcome, rng, waiting = outcome or FuzzOutcome(), random.Random(seed), iter(requests)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def send() -> None:
            for each in waiting:
                gives_up_s = rng.uniform(0.001, 1.0) if rng.random() < HANG_UP_SHARE else None
                began_at = time.time()
                try:
                    async with asyncio.timeout(gives_up_s):
                        status, content = await _post(session, base_url, each)
                except TimeoutError:
                    status, content = -1, b""
                    if gives_up_s is None:
                        outcome.faults.append(f"no answer in {timeout_s} s: {_shown(each)}")
                _note(outcome, each, began_at, status, content)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(send())
    return outcome


async def _post(session: aiohttp.ClientSession, base_url: str, each: HostileRequest) -> tuple[int, bytes]:
    url = yarl.URL(base_url + each.path, encoded=True)
    try:
        async with session.request(
            each.target.method,
            url,
            data=io.BytesIO(each.body) if each.body else None,
            headers={"Content-Type": each.content_type},
        ) as response:
            is_endless = each.target.endpoint is UI_EVENTS and response.status == 200
            return response.status, b"" if is_endless else await response.read()
    except aiohttp.ClientError:
        return 0, b""


def _note(outcome: FuzzOutcome, each: HostileRequest, began_at: float, status: int, content: bytes) -> None:
    sent = Sent(began_at, time.time(), _shown(each), len(each.body), status)
    outcome.recent.append(sent)
    outcome.statuses[status] += 1
    outcome.by_path[each.target.endpoint.path] += 1
    outcome.fields.add(each.target.field)
    if (
        outcome.slowest is None
        or sent.ended_at - sent.began_at > outcome.slowest.ended_at - outcome.slowest.began_at
    ):
        outcome.slowest = sent
    if status >= 500:
        outcome.faults.append(f"{sent}: {content[:300]!r}")
    elif status >= 400 and each.target.endpoint.form.value != "none" and not _is_error(content):
        outcome.faults.append(f"{sent}: no error of the API: {content[:300]!r}")


def _is_error(content: bytes) -> bool:
    """Return whether it is short, and has the form of the API's errors."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, TypeError, KeyError):
        return False
    return (
        len(content) <= MAX_ERROR_BYTES and isinstance(error, dict) and isinstance(error.get("message"), str)
    )


def _shown(each: HostileRequest) -> str:
    return f"{each.target.name} = {each.value}"
