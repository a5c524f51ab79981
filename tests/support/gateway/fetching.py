"""A fetcher of the gateway's with bounds for tests, and names that a test chooses."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.support.gateway.media_server import SERVED
from triptych_common.domain.errors import RequestError
from triptych_gateway.fetch.fetcher import MediaFetcher, open_fetcher
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import FetchSettings

PATH = "messages[0].content[0].image_url.url"
ALL_PORTS = range(1, 65536)
QUICK = FetchSettings(
    max_item_bytes=100_000,
    fetch_allowed_ports=tuple(ALL_PORTS),  # _PORTS,
    fetch_allowed_networks=(ip_network(f"{SERVED}/32"),),
    fetch_timeout_s=5.0,
    fetch_connect_timeout_s=1.0,
    fetch_chunk_timeout_s=1.0,
)


class ChosenNames(AbstractResolver):
    """Each lookup of a name gives the next of its answers, then the last one; others do not exist."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.num_lookups = 0

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        self.num_lookups += 1
        answers = self.answers.get(host)
        if not answers:
            raise OSError(None, "no such name")
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [result(host, address, port) for address in addresses]

    async def close(self) -> None:
        pass


class TurningList(list[ResolveResult]):
    """A list that shows `first` to whoever looks first, and its own members from then on."""

    def __init__(self, first: list[ResolveResult], then: list[ResolveResult]) -> None:
        super().__init__(then)
        self._first: list[ResolveResult] | None = first

    def __iter__(self) -> Iterator[ResolveResult]:
        first, self._first = self._first, None
        return super().__iter__() if first is None else iter(first)


class TurningNames(ChosenNames):
    """The check sees one address, the connection another: what no resolver should be able to do."""

    def __init__(self, checked: str, connected: str) -> None:
        super().__init__()
        self._checked, self._connected = checked, connected

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        self.num_lookups += 1
        return TurningList([result(host, self._checked, port)], [result(host, self._connected, port)])


def result(host: str, address: str, port: int) -> ResolveResult:
    return ResolveResult(hostname=host, host=address, port=port, family=0, proto=0, flags=0)


@asynccontextmanager
async def fetching(names: AbstractResolver | None = None, /, **changes: Any) -> AsyncIterator[MediaFetcher]:
    """A fetcher with `QUICK` bounds, but for `changes`."""
    with ThreadPoolExecutor(1) as threads:
        settings = FetchSettings(**{**dict(QUICK), **changes})
        async with open_fetcher(settings, threads, GatewayMetrics(), names or ChosenNames()) as fetcher:
            yield fetcher


async def fetch(
    fetcher: MediaFetcher,
    url: str,
    *,
    salt: str = "",
    limit_s: float = 10.0,
    on_growth: Callable[[int], None] = lambda _: None,
) -> bytes:
    """As `MediaIntake` does: accepted, then fetched."""
    accepted = fetcher.accept(url, PATH)
    return await fetcher.fetch(accepted, PATH, salt, time.monotonic() + limit_s, on_growth)


async def refusal(fetcher: MediaFetcher, url: str, **options: Any) -> RequestError:
    """The error of a URL that cannot be fetched; it names the item and tells no secret."""
    with pytest.raises(RequestError) as caught:
        await fetch(fetcher, url, **options)
    assert caught.value.param == PATH
    assert PATH in caught.value.message
    for secret in ("signature", "127.0.0", "/private"):
        assert secret not in caught.value.message
    return caught.value


def code_of(error: RequestError) -> tuple[int, str]:
    return error.status_code, error.code


def outcomes(fetcher: MediaFetcher) -> dict[str, float]:
    """Counted so far, by outcome."""
    (metric,) = fetcher.metrics.fetches.collect()
    return {each.labels["outcome"]: each.value for each in metric.samples if each.name.endswith("_total")}
