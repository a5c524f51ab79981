"""What a running system holds, and whether it is whole. Nothing here takes part in it."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import orjson
import psutil
import redis

from tests.support.fast.layout import kind_of as kind_of
from tests.support.fast.redis_inspection import registered_records, stream_leftovers
from tests.support.leftovers import store_leftovers
from tests.support.real.processes import pids_of
from tests.support.real.system import System
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import StoreError

DEPLOYMENT = "default"
LIMIT_S = 60.0
ENGINE_KINDS = ("encoder", "prefill_decode")
NOT_THERE = (StoreError, httpx.HTTPError, redis.RedisError, OSError, psutil.Error)
_WAITS = re.compile(r"^vllm:num_requests_(running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def redis_url(system: System) -> str:
    return f"unix://{system.run_dir / 'redis.sock'}"


def gateway_urls(system: System, num_gateways: int) -> list[str]:
    """Of each gateway, without `/v1`."""
    first = httpx.URL(system.base_url)
    ports = range(first.port or 0, (first.port or 0) + num_gateways)
    return [f"http://{first.host}:{port}" for port in ports]


def health(url: str) -> dict[str, object]:
    """Of a gateway, as it reports.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    answer = httpx.get(f"{url}/health/ready", timeout=LIMIT_S, trust_env=False)
    report: dict[str, object] = answer.json()
    return report


def is_whole(system: System, urls: Sequence[str]) -> bool:
    """Every gateway sees Redis and every engine."""
    expected = {name for name in system.services() if kind_of(name) in (*ENGINE_KINDS, "gateway")}
    try:
        reports = [health(url) for url in urls]
        system.store_stats()
    except NOT_THERE:
        return False
    return all(
        report["status"] == "ready"
        and report["redis"]
        and {each["instance"] for each in report["instances"]} == expected  # type: ignore[attr-defined]
        for report in reports
    )


def leftovers(system: System, urls: Sequence[str]) -> dict[str, int]:
    """What must not be there when nothing is asked; empty: nothing.

    Raises:
        StoreError, httpx.HTTPError, redis.RedisError, OSError: a service does not answer.
        ValueError: a prefill_decode does not report how many requests it has.
    """
    found = store_leftovers(system.store_stats())
    found |= requests_in_engines(system)
    for url in urls:
        found[f"{url} requests"] = int(str(health(url)["num_requests"]))
    found |= stream_leftovers(redis_url(system), DEPLOYMENT)
    return {what: number for what, number in found.items() if number}


def requests_in_engines(system: System) -> dict[str, int]:
    """`NAME running` and `NAME waiting` of each prefill_decode; those that are parked are waiting ones.

    Raises:
        httpx.HTTPError, redis.RedisError: a service does not answer.
        ValueError: a prefill_decode does not report it.
    """
    found: dict[str, int] = {}
    names = [name for name in system.services() if kind_of(name) == "prefill_decode"]
    for name, record in registered_records(redis_url(system), DEPLOYMENT, names).items():
        text = httpx.get(f"{record['url']}/metrics", timeout=LIMIT_S, trust_env=False).text
        numbers = _WAITS.findall(text)
        if not numbers:
            raise ValueError(f"{name} has no metrics of its requests: {text[:1000]}")
        found |= {f"{name} {state}": int(float(number)) for state, number in numbers}
    return found


def rss_bytes(system: System) -> dict[str, int]:
    """Of all processes of each service: memory of their own and shared."""
    found = {}
    for name in system.services():
        found[name] = 0
        for pid in pids_of(system, name):
            try:
                found[name] += psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
    return found


def encodes(system: System) -> list[tuple[str, str]]:
    """(mm_hash, instance) of each encode whose span was written, in no order."""
    return [_item_of(span) for span in spans_with(system, "encoder.encode")]


def injections(system: System) -> list[tuple[str, str]]:
    """(mm_hash, instance) of each tensor that was read from the store, and whose span was written."""
    return [_item_of(span) for span in spans_with(system, "prefill.inject")]


def versions(system: System) -> dict[str, str]:
    """By request id, the model's version that it was last sent to; of requests whose span was written."""
    attributes = [span["attributes"] for span in spans_with(system, "triptych.version")]
    return {each["triptych.request_id"]: each["triptych.version"] for each in attributes}


def spans_with(system: System, word: str) -> Iterator[dict[str, Any]]:
    """Spans that have `word` as their name, or as the name of an attribute."""
    wanted = f'"{word}"'.encode()
    for path in system.traces_dir.glob("*.jsonl"):
        with path.open("rb") as lines:
            for line in lines:
                if wanted in line and line.endswith(b"\n"):
                    yield orjson.loads(line)


def _item_of(span: dict[str, Any]) -> tuple[str, str]:
    return str(span["attributes"]["triptych.mm_hash"]), str(span["instance"])


def prefill_decode_url(system: System) -> str:
    """Of its own HTTP port, by the registry."""

    async def look() -> str:
        bus = await AsyncBus.connect(redis_url(system), "default", client_name="test")
        async with bus:
            records = await Registry(bus).list_instances()
        return next(str(record.url) for record in records if record.url and record.model)

    return asyncio.run(look())
