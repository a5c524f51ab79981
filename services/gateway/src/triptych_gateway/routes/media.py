"""GET /internal/media/{token}: for encoders, while a request that needs the media lives."""

from fastapi import APIRouter
from starlette.responses import Response

from triptych_common.domain.errors import RequestError
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.media_cache import MEDIA_PATH, MediaCache, media_gone


def media_routes(media_cache: MediaCache, orders: EncodeOrders) -> APIRouter:
    router = APIRouter()

    @router.get(MEDIA_PATH + "/{token}")
    async def fetch(token: str) -> Response:
        slot = media_cache.media_by_token(token)
        if slot is None:
            raise media_gone()
        try:
            content = await slot.fetch()
        except RequestError as error:
            orders.on_media_failed(slot.mm_hash, error)
            raise
        return Response(content, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    return router
