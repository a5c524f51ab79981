"""CORS: web pages that may call the API from a browser. Off unless the operator names their origins."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

API_PATHS = "/v1/"
MAX_AGE_S = 600  # that a browser need not ask again
READABLE_HEADERS = (
    "X-Request-Id",
    "Request-Id",
    "Retry-After",
    *(
        f"x-ratelimit-{part}-{rate}"
        for part in ("limit", "remaining", "reset")
        for rate in ("requests", "tokens")
    ),
)


class CrossOrigin:
    """ASGI application around `app` that lets pages call the API, not metrics and health.

    Keys are shown by a header that a page sets itself. Browsers send no credentials of their own.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """Store the origins: `https://app.example.org`, or `*` for all."""
        self._app = app
        self._api = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=READABLE_HEADERS,
            max_age=MAX_AGE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(API_PATHS)
        await (self._api if is_api else self._app)(scope, receive, send)
