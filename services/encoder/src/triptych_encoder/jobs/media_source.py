"""Source of a job's media: the job itself, or the gateway that keeps them."""

import asyncio
import io
import time
from http import HTTPStatus
from typing import Any

import httpcore
import httpx

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob

READ_TIMEOUT_S = 10.0  # for connecting, and for each read
BUSY_WAIT_S = 0.5  # until a gateway is asked again that has made this one wait
FETCH_TIMEOUT_S = 30.0  # for one item as a whole, whatever the client's limits for single reads are


def new_http_client(timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.AsyncClient:
    """Return a client without proxies and redirects. Its pool belongs to one event loop."""
    return httpx.AsyncClient(
        timeout=timeout, transport=_Transport(limits), trust_env=False, follow_redirects=False
    )


class _Transport(httpx.AsyncHTTPTransport):
    """Transport of httpx with connections made by `_Backend`.

    Every failure of a connection is an `httpx.HTTPError`, on uvloop too. There a connection that its peer has
    reset has no socket any more. httpcore asks each new connection, and each idle one, about its socket, and
    anyio then asks the socket that is not there: a server that dies while it is connected to would be an
    AttributeError.
    """

    def __init__(self, limits: httpx.Limits) -> None:
        ssl_context = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=ssl_context, limits=limits)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Backend(),
        )


class _Backend(httpcore.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await super().connect_tcp(*args, **options))


class _Stream(httpcore.AsyncNetworkStream):
    """Stream that wraps another one, which may be reset at any time."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(*args, **options))

    def get_extra_info(self, info: str) -> Any:
        """Return the stream's info; for a stream without a socket, report only that it is readable.

        The pool then drops an idle connection, and the first read of a new one raises its error.
        """
        try:
            return self._stream.get_extra_info(info)
        except (AttributeError, ValueError):  # the socket is None, or has no descriptor any more
            return True if info == "is_readable" else None


class MediaGoneError(TriptychError):
    """The gateway no longer serves the media, or is unreachable."""


def new_media_client() -> httpx.AsyncClient:
    """HTTP client of one encoder, whose slots bound the connections."""
    return new_http_client(httpx.Timeout(READ_TIMEOUT_S), httpx.Limits(max_keepalive_connections=20))


class MediaSource:
    """Fetches at most `max_bytes` in limited time, from the gateway's own address in the job."""

    def __init__(self, client: httpx.AsyncClient, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes

    async def fetch(self, job: EncodeJob, envelope: Envelope) -> bytes:
        """Fetch the media of `job`.

        Raises:
            MediaGoneError: neither inline nor to be had, or not of the announced length.
        """
        if envelope.blob is not None:
            media = envelope.blob
        elif job.media_url is None or job.media_num_bytes > self._max_bytes:
            raise MediaGoneError("the job carries no media that can be fetched")
        else:
            media = await self._download(job.media_url, job.media_num_bytes, envelope.deadline)
        if len(media) != job.media_num_bytes:
            raise MediaGoneError("the media are not of the announced length")
        return media

    async def _download(self, url: str, num_bytes: int, deadline: float | None) -> bytes:
        """Download little more than `num_bytes` at most."""
        left_s = FETCH_TIMEOUT_S if deadline is None else min(FETCH_TIMEOUT_S, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                while (media := await self._ask(url, num_bytes)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(BUSY_WAIT_S)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, TimeoutError) as error:
            raise MediaGoneError("the gateway did not serve the media") from error
        return media

    async def _ask(self, url: str, num_bytes: int) -> bytes | None:
        """One request; None if the gateway is already sending as many media as it may."""
        async with self._client.stream("GET", url) as response:
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                return None
            response.raise_for_status()
            media = io.BytesIO()  # gives its memory away without a copy
            async for chunk in response.aiter_bytes():
                media.write(chunk)
                if media.tell() > num_bytes:
                    break
            return media.getvalue()
