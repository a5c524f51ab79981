"""Source of a job's media: the job itself, or the gateway that keeps them."""

import asyncio
import io
import time
from http import HTTPStatus

import httpx

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob
from triptych_common.runtime.http_client import new_http_client

READ_TIMEOUT_S = 10.0  # for connecting, and for each read
BUSY_WAIT_S = 0.5  # until a gateway is asked again that has made this one wait
FETCH_TIMEOUT_S = 30.0  # for one item as a whole, whatever the client's limits for single reads are


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
