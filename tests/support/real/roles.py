"""Instances of a system, asked directly at their own ports."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.real.inspection import redis_url
from tests.support.real.system import System
from tests.support.scraping import scrape
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord


@dataclass(frozen=True)
class Instance:
    """One that has registered."""

    record: InstanceRecord

    @classmethod
    def of(cls, system: System, name: str) -> "Instance":
        async def registered() -> list[InstanceRecord]:
            async with await AsyncBus.connect(redis_url(system), "default", client_name="test") as bus:
                return await Registry(bus).list_instances()

        (record,) = (each for each in asyncio.run(registered()) if each.instance == name)
        return cls(record)

    @property
    def url(self) -> str:
        assert self.record.url is not None
        return self.record.url

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)

    def metric(self, name: str) -> float:
        return scrape(int(self.url.rpartition(":")[2])).total(name)

    @property
    def holds_kv_blocks(self) -> bool:
        return self.metric("vllm:kv_cache_usage_perc") > 0


FRONT_END = {"TRIPTYCH_FRONT_END_NETWORKS": '["127.0.0.0/8"]'}
"""For a system in which a test names the instances of each request."""


def headers_of_pair(system: System, prefiller: str, decoder: str) -> dict[str, str]:
    """Return headers of a front end that has chosen these instances, which may be one and the same."""
    names = {"x-prefiller-host-port": prefiller, "x-data-parallel-host-port": decoder}
    return {header: Instance.of(system, name).url.removeprefix("http://") for header, name in names.items()}
