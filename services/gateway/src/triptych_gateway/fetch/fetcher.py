"""Media by URL: checked by the rules, then fetched, or read from below the root.

A `file://` URL is read below one root. Each part of its path is opened in the folder that was opened before
it, and refused where it is a link. The last one is checked through its own descriptor: a regular file, of
bounded size.

Errors leave here in the gateway's format, with the item's place in the request.
"""

import asyncio
import io
import os
import re
import stat
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote_to_bytes

from aiohttp.abc import AbstractResolver

from triptych_common.domain.errors import RequestError
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import Modality
from triptych_common.telemetry import span
from triptych_gateway.fetch.client import open_client
from triptych_gateway.fetch.downloader import Downloader, FetchSlots
from triptych_gateway.fetch.failures import (
    ContentTooLargeError,
    FetchError,
    FetchTimeoutError,
    MalformedUrlError,
    NoResourcesError,
    ServerRefusedError,
    UrlRefusedError,
    request_error,
)
from triptych_gateway.fetch.fetch_rules import (
    CONTROL,
    MAX_URL_CHARS,
    AddressRules,
    FetchUrl,
    HostRules,
    UrlRules,
)
from triptych_gateway.fetch.response_cache import ResponseCache
from triptych_gateway.fetch.shared_downloads import OnGrowth, SharedDownloads
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import FetchSettings

_URL = re.compile(r"file://(?P<host>[^/?#]*)(?P<path>/[^?#]*)", re.IGNORECASE)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO does not block
READ_BYTES = 1 << 20
MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class LocalFile:
    """File below the root, by the names that lead to it."""

    names: tuple[str, ...] = field(repr=False)


class LocalFiles:
    """Reader of files below one gateway's root."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes

    def accept(self, text: str) -> LocalFile:
        """Return the file that the URL `text` names, without checking that it exists.

        Raises:
            MalformedUrlError: no file URL.
            UrlRefusedError: of another host, or not below the root.
        """
        found = _URL.fullmatch(text) if len(text) <= MAX_URL_CHARS else None
        if found is None or CONTROL.search(text):
            raise MalformedUrlError("it is not a file URL")
        if found["host"].lower() not in ("", "localhost"):
            raise UrlRefusedError("only files of this host are read")
        path = os.fsdecode(unquote_to_bytes(found["path"]))
        names = path.split("/")[1:]
        root = PurePosixPath(self._root).parts[1:]
        if "\x00" in path or len(names) > MAX_NAMES or any(name in ("", ".", "..") for name in names):
            raise UrlRefusedError("its path has parts that are not allowed")
        if tuple(names[: len(root)]) != root or len(names) == len(root):
            raise UrlRefusedError("only files below the root that the operator has set are read")
        return LocalFile(tuple(names[len(root) :]))

    def read(self, file: LocalFile) -> bytes:
        """Return the file's bytes. Call it in a thread.

        Raises:
            FetchError: it cannot be read, is no regular file, or is too large.
        """
        try:
            with ExitStack() as stack:
                return self._read(self._open(file, stack))
        except OSError as error:
            if is_transient(error):
                raise NoResourcesError("the gateway cannot open it just now") from error
            raise _unreadable() from error

    def _open(self, file: LocalFile, stack: ExitStack) -> int:
        *folders, last = file.names
        opened = os.open(self._root, _FOLDER)
        stack.callback(os.close, opened)
        for name in folders:
            opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=opened)
            stack.callback(os.close, opened)
        opened = os.open(last, _FILE, dir_fd=opened)
        stack.callback(os.close, opened)
        return opened

    def _read(self, opened: int) -> bytes:
        info = os.fstat(opened)
        if not stat.S_ISREG(info.st_mode):
            raise _unreadable()
        content = io.BytesIO()  # gives its memory away without a copy
        while info.st_size <= self._max_bytes >= content.tell():
            piece = os.read(opened, READ_BYTES)
            if not piece:
                return content.getvalue()
            content.write(piece)
        raise ContentTooLargeError(f"it is larger than {self._max_bytes} bytes")


def _unreadable() -> FetchError:
    """Return one error for all reasons, so that a caller learns nothing about the folder."""
    return ServerRefusedError("it is no file that can be read")


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
        seconds = self.metrics.fetch_s.labels(modality.value)
        with seconds.time(), span("gateway.fetch", attributes={"triptych.host": host}) as current:
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
    settings: FetchSettings, threads: Executor, metrics: GatewayMetrics, names: AbstractResolver | None = None
) -> AsyncIterator[MediaFetcher]:
    """Open a fetcher whose downloads run while the block does, with `names` as resolver."""
    files = (
        None
        if settings.fetch_file_root is None
        else LocalFiles(settings.fetch_file_root, settings.max_item_bytes)
    )
    if not settings.fetch_urls:
        yield MediaFetcher(None, None, files, threads, metrics, settings.fetch_timeout_s)
        return
    rules = UrlRules(
        frozenset(settings.fetch_allowed_ports),
        HostRules(settings.fetch_allowed_hosts, settings.fetch_denied_hosts),
        AddressRules(settings.fetch_allowed_networks),
    )
    slots = FetchSlots(settings.fetch_max_in_flight, settings.fetch_max_per_host)
    cache = ResponseCache(settings.fetch_cache_bytes)
    async with (
        open_client(settings, names) as client,
        SharedDownloads(Downloader(rules, client, slots, cache, settings), settings, metrics) as downloads,
    ):
        metrics.fetches_in_flight.set_function(lambda: len(downloads))
        yield MediaFetcher(rules, downloads, files, threads, metrics, settings.fetch_timeout_s)
