"""Where a job's media come from: inside the job, or from the gateway that keeps them."""

import httpx
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob


class MediaGoneError(TriptychError):
    """The gateway no longer serves the media, or cannot be reached."""


class MediaSource:
    """Fetches at most `max_bytes`, bounded in time; the address is the gateway's own, told in the job."""

    def __init__(self, client: httpx.AsyncClient, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes

    async def fetch(self, job: EncodeJob, envelope: Envelope) -> bytes:
        """The media of `job`.

        Raises:
            MediaGoneError: neither inline nor to be had, or not of the announced length.
        """
        if envelope.blob is not None:
            return envelope.blob
        if job.media_url is None or job.media_num_bytes > self._max_bytes:
            raise MediaGoneError("the job carries no media that can be fetched")
        try:
            async with self._client.stream("GET", job.media_url) as response:
                response.raise_for_status()
                media = bytearray()
                async for chunk in response.aiter_bytes():
                    media += chunk
                    if len(media) > job.media_num_bytes:
                        break
        except httpx.HTTPError as error:
            raise MediaGoneError(f"the gateway did not serve the media: {type(error).__name__}") from error
        if len(media) != job.media_num_bytes:
            raise MediaGoneError("the gateway served media of another length")
        return bytes(media)
