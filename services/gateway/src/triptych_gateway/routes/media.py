"""GET /internal/media/{token}: for encoders, while a request that needs the media lives."""

from fastapi import APIRouter
from starlette.responses import Response

from triptych_common.domain.errors import RequestError
from triptych_gateway.encode.media_cache import MEDIA_PATH, MediaCache
from triptych_gateway.request.known_file import KnownFile


def media_routes(media_cache: MediaCache) -> APIRouter:
    router = APIRouter()

    @router.get(MEDIA_PATH + "/{token}")
    async def fetch(token: str) -> Response:
        content = media_cache.media_by_token(token)
        if content is None:
            raise RequestError(404, "media_gone", "no living request holds this media")
        if isinstance(content, KnownFile):
            content = await content.fetch()
        return Response(content, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    return router
