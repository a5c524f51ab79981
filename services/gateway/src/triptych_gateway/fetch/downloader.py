"""Downloader: one attempt to download one item, within bounds on size and on downloads at once.

url --rules--> fresh in the cache? --> slot --> GET --+--> 200, 304: the bytes
 ^                                                    `--> 3xx: Location --.
 `-------------------------------------------------------------------------'
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Literal, Protocol

from aiohttp import ClientResponse, ClientSession
from yarl import URL

from triptych_gateway.fetch.client import TRANSPORT_ERRORS, failure_of
from triptych_gateway.fetch.failures import ContentTooLargeError, ServerFailedError, ServerRefusedError
from triptych_gateway.fetch.fetch_rules import FetchUrl, UrlRules
from triptych_gateway.fetch.response_cache import (
    CachedResponse,
    CacheKey,
    ResponseCache,
    freshness_of,
    retry_after_s,
)
from triptych_gateway.settings import FetchSettings


@dataclass(slots=True)
class _HostSlots:
    slots: asyncio.Semaphore
    num_users: int = 0  # that hold a slot, or wait for one


class FetchSlots:
    """Slots taken per host first: requests that wait for a slow host take none of the others'."""

    def __init__(self, max_total: int, max_per_host: int) -> None:
        self._total = asyncio.Semaphore(max_total)
        self._max_per_host = max_per_host
        self._hosts: dict[str, _HostSlots] = {}

    def __len__(self) -> int:
        """Return the number of hosts with a running or waiting download."""
        return len(self._hosts)

    @asynccontextmanager
    async def hold(self, host: str) -> AsyncIterator[None]:
        """Hold a slot while the block runs. Waits for it without a bound."""
        own = self._hosts.setdefault(host, _HostSlots(asyncio.Semaphore(self._max_per_host)))
        own.num_users += 1
        try:
            async with own.slots, self._total:
                yield
        finally:
            own.num_users -= 1
            if not own.num_users:
                del self._hosts[host]


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
How = Literal["fetched", "cached", "revalidated"]


@dataclass(frozen=True, slots=True)
class Downloaded:
    """Bytes of a URL, and their source."""

    content: bytes = field(repr=False)
    how: How


class DownloadProgress(Protocol):
    is_queued: bool  # it waits for a slot

    def grow(self, num_bytes: int) -> None:
        """Report bytes before they are held. May raise, or cancel the task."""


@dataclass(frozen=True, slots=True)
class Downloader:
    """Downloader of one gateway, for one attempt at a time per URL."""

    rules: UrlRules
    client: ClientSession
    slots: FetchSlots
    cache: ResponseCache
    settings: FetchSettings

    async def download(self, url: FetchUrl, tenant_salt: str, progress: DownloadProgress) -> Downloaded:
        """Make one attempt. Bound it in time.

        Raises:
            FetchError: `ServerFailedError` where another attempt may succeed.
        """
        for _ in range(self.settings.fetch_max_redirects + 1):
            found = await self._ask(url, CacheKey(tenant_salt, url.text), progress)
            if isinstance(found, Downloaded):
                return found
            url = self.rules.check_redirect(url, found)
        raise ServerRefusedError(f"it is redirected more than {self.settings.fetch_max_redirects} times")

    async def _ask(self, url: FetchUrl, key: CacheKey, progress: DownloadProgress) -> Downloaded | str:
        cached = self.cache.find(key)
        if cached is not None and time.monotonic() < cached.fresh_until:
            progress.grow(len(cached.content))
            return Downloaded(cached.content, "cached")
        progress.is_queued, proxy = True, self.settings.fetch_proxy
        async with self.slots.hold(url.host):
            progress.is_queued = False
            try:
                response = await self.client.get(
                    URL(url.text, encoded=True),
                    headers=None if cached is None else cached.freshness.validators,
                    allow_redirects=False,
                    proxy=None if proxy is None else proxy.get_secret_value(),
                )
                try:
                    return await self._take(response, key, cached, progress)
                finally:
                    response.close()  # whatever it still sends is not wanted
            except TRANSPORT_ERRORS as error:
                raise failure_of(error) from error

    async def _take(
        self,
        response: ClientResponse,
        key: CacheKey,
        cached: CachedResponse | None,
        progress: DownloadProgress,
    ) -> Downloaded | str:
        status, headers = response.status, response.headers
        if (
            sum(len(name) + len(value) for name, value in response.raw_headers)
            > self.settings.fetch_max_header_bytes
        ):
            raise ServerRefusedError("its server's headers are too large")
        if status in _REDIRECTS and "Location" in headers:
            return headers["Location"]
        if status == HTTPStatus.NOT_MODIFIED and cached is not None:
            progress.grow(len(cached.content))
            self._keep(key, cached.content, response, cached)
            return Downloaded(cached.content, "revalidated")
        if status != HTTPStatus.OK:
            raise _status_error(status, headers)
        content = await self._read(response, progress)
        self._keep(key, content, response, None)
        return Downloaded(content, "fetched")

    async def _read(self, response: ClientResponse, progress: DownloadProgress) -> bytes:
        max_bytes = self.settings.max_item_bytes
        encodings = ",".join(response.headers.getall("Content-Encoding", ()))
        if encodings.strip().lower() not in ("", "identity"):
            raise ServerRefusedError("its server sent it compressed without being asked")
        if (response.content_length or 0) > max_bytes:
            raise _too_large(max_bytes)
        content = io.BytesIO()  # gives its memory away without a copy
        while chunk := await response.content.readany():
            num_bytes = content.tell() + len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            progress.grow(num_bytes)
            content.write(chunk)
        return content.getvalue()

    def _keep(
        self, key: CacheKey, content: bytes, response: ClientResponse, before: CachedResponse | None
    ) -> None:
        headers = {name.lower(): ", ".join(response.headers.getall(name)) for name in response.headers}
        freshness = freshness_of(headers, time.time())
        if before is not None and not freshness.validators:  # a 304 need not repeat them
            old = before.freshness
            freshness = replace(freshness, etag=old.etag, last_modified=old.last_modified)
        self.cache.keep(key, content, freshness, time.monotonic())


def _too_large(max_bytes: int) -> ContentTooLargeError:
    return ContentTooLargeError(f"it is larger than {max_bytes} bytes")


def _status_error(status: int, headers: Mapping[str, str]) -> ServerFailedError | ServerRefusedError:
    reason = f"its server answered with status {status}"
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500:
        return ServerFailedError(reason, retry_after_s(headers.get("Retry-After"), time.time()))
    return ServerRefusedError(reason)
