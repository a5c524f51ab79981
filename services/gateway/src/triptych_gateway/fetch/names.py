"""Host names, looked up for each connection and checked; no lookup is cached.

Lookups have threads of their own: a name server that does not answer holds a thread for as long as the
system's resolver tries, and the event loop's are needed for the names of prefill_decodes.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult

from triptych_gateway.fetch.rules.addresses import AddressRules

NUM_THREADS = 16


class AddressRefusedError(OSError):
    """Connection to a forbidden address. An OSError, since aiohttp expects no other error there."""

    def __init__(self) -> None:
        super().__init__("the address is not allowed")


class SystemNames(AbstractResolver):
    """Resolver of the system, in threads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            return await loop.run_in_executor(self._threads, _look_up, host, port, family)

    async def close(self) -> None:
        """Close without waiting for lookups that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedNames(AbstractResolver):
    """Resolver that refuses a name with any forbidden address: chance may pick that one."""

    def __init__(self, names: AbstractResolver, rules: AddressRules) -> None:
        self._names = names
        self._rules = rules

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not all(self._rules.allows_text(each["host"]) for each in found):
            raise AddressRefusedError
        return found

    async def close(self) -> None:
        await self._names.close()


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(
        host.encode("ascii"), port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=port,
            family=each_family,
            proto=protocol,
            flags=socket.AI_NUMERICHOST,
        )
        for each_family, _, protocol, _, address in found
    ]
