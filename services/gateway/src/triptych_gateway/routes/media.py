"""GET /internal/media/{token}: media for encoders, while a request that needs them lives.

Media go out piece by piece, as the encoder takes them, a bounded number of items at once. The others wait,
in order, and get 503 `media_busy` before the encoder gives up reading.
"""

import asyncio

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.media_cache import MEDIA_PATH, media_gone
from triptych_gateway.errors import unavailable
from triptych_gateway.gateway import Gateway

log = get_logger(__name__)

PIECE_BYTES = 256 << 10  # the event loop is held while the system takes one
WAIT_S = 5.0  # for a place; the encoder reads for 10 s at most
PIECE_TIMEOUT_S = 10.0  # for the encoder to take one: a place would else never be free again


class MediaAnswer(Response):
    """Answer with the media of one token, which are looked up at their turn: nothing is held before."""

    media_type = "application/octet-stream"

    def __init__(self, token: str, gateway: Gateway, places: asyncio.Semaphore) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._token, self._gateway, self._places = token, gateway, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise unavailable("media_busy", "too many media are being sent; try again shortly") from error
        try:
            await self._send_pieces(await self._content(), send)
        finally:
            self._places.release()

    async def _content(self) -> bytes:
        """Return the bytes. Raises RequestError: 404, which fails the item if it cannot be read."""
        slot = self._gateway.media_cache.media_by_token(self._token)
        if slot is None:
            raise media_gone()
        try:
            return await slot.fetch()
        except RequestError as error:
            self._gateway.orders.on_media_failed(slot.mm_hash, error)
            raise media_gone() from error  # a 503 would be asked again

    async def _send_pieces(self, content: bytes, send: Send) -> None:
        self.headers["Content-Length"] = str(len(content))
        pieces = memoryview(content)
        try:
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for at in range(0, len(content), PIECE_BYTES):
                end = at + PIECE_BYTES
                piece = bytes(pieces[at:end])  # what a peer does not read holds this much, and not all
                async with asyncio.timeout(PIECE_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": end < len(content)})
        except TimeoutError:
            log.info("encoder does not read the media that it asked for")


def media_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    places = asyncio.Semaphore(gateway.settings.max_media_sends)

    @router.get(MEDIA_PATH + "/{token}")
    async def fetch(token: str) -> Response:
        return MediaAnswer(token, gateway, places)

    return router
