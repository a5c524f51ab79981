"""Shared downloads: one per URL and tenant, for any number of requests.

A download belongs to no request: its task goes on when the one that began it ends, and ends when no request
waits for it any more. Requests that come while it runs wait for the same bytes, each within its own time.
"""

import asyncio
import random
from collections.abc import Callable
from contextvars import Context
from typing import Self

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry import get_logger
from triptych_gateway.errors import unavailable
from triptych_gateway.fetch.downloader import Downloaded, Downloader
from triptych_gateway.fetch.failures import FetchBusyError, FetchError, FetchTimeoutError, ServerFailedError
from triptych_gateway.fetch.fetch_rules import FetchUrl
from triptych_gateway.fetch.response_cache import CacheKey
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import FetchSettings

log = get_logger(__name__)

OnGrowth = Callable[[int], None]
"""Callback with a number of bytes before they are held; may raise a RequestError."""


FIRST_WAIT_S = 0.2
MAX_WAIT_S = 2.0
MAX_RETRY_AFTER_S = 5.0


def retry_wait_s(
    max_attempts: int, num_attempts: int, error: ServerFailedError, chance: float
) -> float | None:
    """Return the seconds until the next attempt after `num_attempts`; None: there is none.

    `chance`, a number from 0 to 1, spreads the retries of attempts that failed together.
    """
    if num_attempts >= max_attempts:
        return None
    doubled_s = min(FIRST_WAIT_S * 2.0 ** (num_attempts - 1), MAX_WAIT_S)
    wait_s = doubled_s * (0.5 + chance / 2)
    if error.retry_after_s is None:
        return wait_s
    if error.retry_after_s > MAX_RETRY_AFTER_S:
        return None
    return max(error.retry_after_s, wait_s)


class SharedDownload:
    def __init__(self) -> None:
        self.is_queued = False  # no slot yet
        self.num_bytes = 0
        self.task: asyncio.Task[None] | None = None  # its owner's
        self._waiting: dict[asyncio.Future[Downloaded], OnGrowth] = {}

    def grow(self, num_bytes: int) -> None:
        """Have each waiting request book the bytes. A request that may not leaves; the others wait on."""
        self.num_bytes = num_bytes
        for future, on_growth in tuple(self._waiting.items()):
            if future.done():
                continue
            try:
                on_growth(num_bytes)
            except RequestError as error:
                future.set_exception(error)

    async def wait(self, on_growth: OnGrowth) -> Downloaded:
        on_growth(self.num_bytes)
        future: asyncio.Future[Downloaded] = asyncio.get_running_loop().create_future()
        self._waiting[future] = on_growth
        try:
            return await future
        finally:
            del self._waiting[future]
            if future.done() and not future.cancelled():
                future.exception()  # marked as seen: its request has left

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def end(self, outcome: Downloaded | Exception) -> None:
        for future in self._waiting:
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def stop(self) -> None:
        """Stop a download that no request waits for; does nothing after its end."""
        if self.task is not None:
            self.task.cancel()

    def out_of_time(self) -> FetchError:
        if self.is_queued:
            return FetchBusyError("too many other downloads run; try again shortly")
        return FetchTimeoutError("its server took too long")


class SharedDownloads:
    def __init__(self, downloader: Downloader, settings: FetchSettings, metrics: GatewayMetrics) -> None:
        self._downloader = downloader
        self._settings = settings
        self._metrics = metrics
        self._downloads: dict[CacheKey, SharedDownload] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def fetch(
        self, url: FetchUrl, tenant_salt: str, timeout_s: float, on_growth: OnGrowth
    ) -> tuple[Downloaded, bool]:
        """Return the bytes of `url`, and whether another request's download had them.

        Raises:
            FetchError: they could not be had within `timeout_s`.
            RequestError: raised by `on_growth`.
        """
        loop = asyncio.get_running_loop()
        key = CacheKey(tenant_salt, url.text)
        until = loop.time() + timeout_s
        may_go_on = True
        while True:
            download = self._downloads.get(key)
            is_joined = download is not None
            if download is None:
                download = self._begin(key, url)
            try:
                async with asyncio.timeout_at(until):
                    return await download.wait(on_growth), is_joined
            except TimeoutError as error:
                failure = download.out_of_time()
                if not download.is_wanted:  # it ends now
                    _log_failure(url, failure)
                raise failure from error
            except (FetchTimeoutError, FetchBusyError):
                # The time of a download that began before this request, whose own time is not over.
                if not (is_joined and may_go_on):
                    raise
                may_go_on = False
            finally:
                if not download.is_wanted:
                    self._forget(key, download)
                    download.stop()

    def _begin(self, key: CacheKey, url: FetchUrl) -> SharedDownload:
        download = self._downloads[key] = SharedDownload()
        # Not of the request that comes first: neither its end nor its trace.
        run = self._run(key, url, download)
        download.task = asyncio.get_running_loop().create_task(run, context=Context())
        self._tasks.add(download.task)
        download.task.add_done_callback(lambda task: self._on_done(key, download, task))
        return download

    def _on_done(self, key: CacheKey, download: SharedDownload, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._forget(key, download)
        # Those that still wait: it was cancelled, as all are at the end.
        download.end(unavailable("draining", "this gateway is shutting down; send the request again"))

    def _forget(self, key: CacheKey, download: SharedDownload) -> None:
        if self._downloads.get(key) is download:
            del self._downloads[key]

    async def _run(self, key: CacheKey, url: FetchUrl, download: SharedDownload) -> None:
        outcome: Downloaded | Exception
        try:
            async with asyncio.timeout(self._settings.fetch_timeout_s):
                outcome = await self._attempt(key, url, download)
        except TimeoutError:
            outcome = download.out_of_time()
        except Exception as error:
            outcome = error
        finally:
            self._forget(key, download)  # a request that comes from now on begins another one
        if isinstance(outcome, FetchError):
            _log_failure(url, outcome)
        download.end(outcome)

    async def _attempt(self, key: CacheKey, url: FetchUrl, download: SharedDownload) -> Downloaded:
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return await self._downloader.download(url, key.tenant_salt, download)
            except ServerFailedError as error:
                wait_s = retry_wait_s(self._settings.fetch_max_attempts, num_attempts, error, random.random())
                if wait_s is None:
                    raise
            self._metrics.fetch_retries.inc()
            await asyncio.sleep(wait_s)


def _log_failure(url: FetchUrl, error: FetchError) -> None:
    log.warning("media not fetched", host=url.host, outcome=error.outcome, reason=error.reason)
