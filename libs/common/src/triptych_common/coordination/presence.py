"""One question for health checks: is this instance alive, by its own heartbeat?"""

import asyncio

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.coordination.registry import Registry
from triptych_common.domain.errors import BusUnavailableError


def is_registered(url: str, deployment: str, instance: str) -> bool:
    """Whether `instance` has a fresh record; False too when Redis cannot be reached.

    For scripts: runs an event loop of its own.
    """
    return asyncio.run(_is_registered(url, deployment, instance))


async def _is_registered(url: str, deployment: str, instance: str) -> bool:
    try:
        async with await AsyncBus.connect(url, deployment, client_name=f"{instance}/healthcheck") as bus:
            return any(record.instance == instance for record in await Registry(bus).list_instances())
    except BusUnavailableError:
        return False
