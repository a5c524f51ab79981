"""Media by URL: checked by the rules, then fetched, or read from below the root.

Errors leave here in the gateway's format, with the item's place in the request.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_common.telemetry import span
from triptych_gateway.fetch.client import open_client
from triptych_gateway.fetch.downloader import Downloader
from triptych_gateway.fetch.failures import FetchError, FetchTimeoutError, UrlRefusedError, request_error
from triptych_gateway.fetch.local_files import LocalFile, LocalFiles
from triptych_gateway.fetch.options import FetchOptions
from triptych_gateway.fetch.response_cache import ResponseCache
from triptych_gateway.fetch.rules.addresses import AddressRules
from triptych_gateway.fetch.rules.hosts import HostRules
from triptych_gateway.fetch.rules.urls import FetchUrl, UrlRules
from triptych_gateway.fetch.shared_downloads import OnGrowth, SharedDownloads
from triptych_gateway.fetch.slots import FetchSlots
from triptych_gateway.metrics import GatewayMetrics

AcceptedUrl = FetchUrl | LocalFile
SCHEMES = frozenset({"http", "https", "file"})


@dataclass(frozen=True, slots=True)
class MediaFetcher:
    """Fetcher of one gateway; None for rules, downloads or files turns URLs or files off."""

    rules: UrlRules | None
    downloads: SharedDownloads | None
    files: LocalFiles | None
    threads: Executor
    metrics: GatewayMetrics
    timeout_s: float

    def accept(self, text: str, path: str, modality: Modality = Modality.IMAGE) -> AcceptedUrl:
        """Check the URL `text`, of one of `SCHEMES`, without the network.

        Raises:
            RequestError: 400 naming `path`, where the URL stands in the request.
        """
        try:
            if text[:5].lower() == "file:":
                return self._file_root().accept(text)
            if self.rules is not None:
                return self.rules.check(text)
        except FetchError as error:
            self.metrics.fetches.labels(error.outcome).inc()
            raise request_error(error, path, modality) from error
        message = f"{path}: fetching media from http(s) URLs is not enabled; send a data URL"
        raise RequestError(400, "remote_media_disabled", message, path)

    async def fetch(
        self,
        url: AcceptedUrl,
        path: str,
        tenant_salt: str,
        deadline: float,
        on_growth: OnGrowth,
        modality: Modality = Modality.IMAGE,
    ) -> bytes:
        """Return the bytes, waiting until `deadline` (monotonic seconds) at most.

        Args:
            on_growth: called with a number of bytes before they are held; may raise a RequestError.

        Raises:
            RequestError: naming `path`.
        """
        host = url.host if isinstance(url, FetchUrl) else ""
        with span("gateway.fetch", attributes={"triptych.host": host}) as current:
            outcome = "left"
            try:
                content, outcome = await self._fetch(url, tenant_salt, deadline, on_growth)
            except FetchError as error:
                outcome = error.outcome
                raise request_error(error, path, modality) from error
            except RequestError:
                outcome = "over_limit"
                raise
            finally:
                current.set_attribute("triptych.outcome", outcome)
                self.metrics.fetches.labels(outcome).inc()
            current.set_attribute("triptych.num_bytes", len(content))
            return content

    async def _fetch(
        self, url: AcceptedUrl, tenant_salt: str, deadline: float, on_growth: OnGrowth
    ) -> tuple[bytes, str]:
        if isinstance(url, LocalFile):
            read = self._file_root().read
            content = await asyncio.get_running_loop().run_in_executor(self.threads, read, url)
            on_growth(len(content))
            return content, "file"
        timeout_s = min(self.timeout_s, deadline - time.monotonic())
        if self.downloads is None or timeout_s <= 0:
            raise FetchTimeoutError("the request's time is over")
        downloaded, is_joined = await self.downloads.fetch(url, tenant_salt, timeout_s, on_growth)
        return downloaded.content, "joined" if is_joined else downloaded.how

    def _file_root(self) -> LocalFiles:
        if self.files is None:
            raise UrlRefusedError("files are not read here: no root is set")
        return self.files


@asynccontextmanager
async def open_fetcher(
    options: FetchOptions,
    threads: Executor,
    metrics: GatewayMetrics,
    names: AbstractResolver | None = None,
) -> AsyncIterator[MediaFetcher]:
    """Open a fetcher whose downloads run while the block does, with `names` as resolver."""
    files = None if options.file_root is None else LocalFiles(options.file_root, options.max_item_bytes)
    if not options.fetches_urls:
        yield MediaFetcher(None, None, files, threads, metrics, options.timeout_s)
        return
    rules = UrlRules(
        frozenset(options.allowed_ports),
        HostRules(options.allowed_hosts, options.denied_hosts),
        AddressRules(options.allowed_networks),
    )
    slots = FetchSlots(options.max_in_flight, options.max_per_host)
    cache = ResponseCache(options.cache_bytes)
    async with (
        open_client(options, names) as client,
        SharedDownloads(Downloader(rules, client, slots, cache, options), options, metrics) as downloads,
    ):
        metrics.fetches_in_flight.set_function(lambda: len(downloads))
        yield MediaFetcher(rules, downloads, files, threads, metrics, options.timeout_s)
