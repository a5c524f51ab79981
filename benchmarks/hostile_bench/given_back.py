"""Measure what a running system holds for requests, from outside, and the time until it holds nothing."""

import asyncio
import time
from collections.abc import Mapping

import aiohttp
import psutil
from yarl import URL

from tests.support.fast.redis_inspection import registered_records
from tests.support.leftovers import store_leftovers
from tests.support.real.inspection import DEPLOYMENT, redis_url
from tests.support.real.system import System

LIMIT_S = 10.0
LOOK_S = 0.1
COMPILE_SERVER, DECODING = "grammars.compile_server", "decoding.child"
GATEWAY_HOLDS = (
    "triptych_gateway_requests_in_flight",
    "triptych_gateway_encodes_in_flight",
    "triptych_gateway_encode_orders_waiting",
)
ENGINE_HOLDS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting{",
    "triptych_prefill_decode_parked_requests",
    "triptych_prefill_decode_pending_requests",
)


class HeldByRequests:
    """Places, requests and processes of one system."""

    def __init__(self, system: System, session: aiohttp.ClientSession) -> None:
        self._system, self._session = system, session
        names = [name for name in system.services() if name.startswith("prefill_decode")]
        records = registered_records(redis_url(system), DEPLOYMENT, names)
        self._sources: list[tuple[URL, tuple[str, ...]]] = [
            (URL(system.base_url).with_path("/metrics"), GATEWAY_HOLDS)
        ]
        self._sources += [
            (URL(record["url"]).with_path("/metrics"), ENGINE_HOLDS) for record in records.values()
        ]

    async def now(self) -> Mapping[str, float]:
        """Return what is held, without what is 0."""
        found: dict[str, float] = {}
        for url, names in self._sources:
            async with self._session.get(url) as response:
                lines = (await response.text()).splitlines()
            for line in lines:
                if line.startswith(names):
                    name, _, value = line.rpartition(" ")
                    found[f"{url.port} {name.partition('{')[0]}"] = float(value)
        found |= store_leftovers(self._system.store_stats())
        found |= self._working_processes()
        return {name: value for name, value in found.items() if value}

    async def wait_given_back(self) -> tuple[float, str]:
        """Return the seconds until nothing is held, and what is held after `LIMIT_S`, or nothing."""
        began_at = time.monotonic()
        while held := await self.now():
            if time.monotonic() - began_at > LIMIT_S:
                return LIMIT_S, str(held)
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - began_at, ""

    def _working_processes(self) -> dict[str, int]:
        """Count the processes that compile a grammar, and those that decode: these are kept, and wait."""
        found = {"compile processes": 0, "decoding processes at work": 0}
        for service in self._system.services().values():
            try:
                for process in psutil.Process(service["pid"]).children(recursive=True):
                    command = " ".join(process.cmdline())
                    if COMPILE_SERVER in command:
                        parent = process.parent()  # the server, whose own parent is the host
                        is_forked = parent is not None and COMPILE_SERVER in " ".join(parent.cmdline())
                        found["compile processes"] += is_forked
                    elif DECODING in command:
                        is_waiting = process.status() == psutil.STATUS_SLEEPING
                        found["decoding processes at work"] += not is_waiting
            except (psutil.Error, TypeError, AttributeError):
                continue
        return found
