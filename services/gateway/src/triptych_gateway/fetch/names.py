"""Host names, looked up for each connection and checked: nothing is remembered from one to the next.

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
    """A connection to an address that is not allowed. An OSError: aiohttp expects no other there."""

    def __init__(self) -> None:
        super().__init__("the address is not allowed")


class SystemNames(AbstractResolver):
    """The system's resolver."""

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
        """Without waiting for lookups that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedNames(AbstractResolver):
    """Refuses a name where any of its addresses is refused: which of them is connected to may be chance."""

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
