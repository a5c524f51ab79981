"""OpenAI's error format, for every answer that is not a success; Anthropic's for its Messages API.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
    {"type": "error", "error": {"type": ..., "message": ...}}

429 and 503 carry `Retry-After`: the same request may succeed then. 502 carries `X-Should-Retry: false`, which
OpenAI's and Anthropic's clients read: the same request may end another instance.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.endpoints.table import chat_form_of

log = get_logger(__name__)

DEFAULT_RETRY_AFTER_S = 1
MAX_PATH_CHARS = 200
_RETRY_STATUSES = frozenset({429, 503})
_NO_RETRY = {HTTPStatus.BAD_GATEWAY: {"X-Should-Retry": "false"}}
_CODES = {404: "not_found", 405: "method_not_allowed"}
# Anthropic's, by status. Others below 500 are a fault of the request, from there on one of the service.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class EncodeUnavailableError(RequestError):
    """503: no encoder made a media item, and nothing is known to be wrong with it.

    An instance that has a vision tower may still serve the request, with its raw media.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(503, code, message, param)


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a file's content as text: its place, and what is wrong there."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}"


def unavailable(code: str, message: str, param: str | None = None) -> RequestError:
    """Return a 503: the request is valid, and the caller may retry after `Retry-After`."""
    return RequestError(503, code, message, param)


def model_not_found(model: str) -> RequestError:
    """Return the 404 for a model that is not served, or that the caller's key may not use."""
    return RequestError(404, "model_not_found", f"the model {model[:200]!r} does not exist", "model")


def error_body(error: RequestError, form: ChatForm = ChatForm.COMPLETIONS) -> bytes:
    if form is not ChatForm.MESSAGES:
        return orjson.dumps(error.body())
    status = error.status_code
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(error: RequestError, form: ChatForm = ChatForm.COMPLETIONS) -> bytes:
    """Return the error as one server-sent event, for a stream that has begun."""
    name = b"event: error\n" if form is ChatForm.MESSAGES else b""
    return name + b"data: " + error_body(error, form) + b"\n\n"


def error_response(
    error: RequestError, headers: Mapping[str, str] | None = None, form: ChatForm = ChatForm.COMPLETIONS
) -> Response:
    all_headers = {**(headers or {}), **_NO_RETRY.get(HTTPStatus(error.status_code), {})}
    if error.status_code in _RETRY_STATUSES:
        all_headers["Retry-After"] = str(math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S))
    return Response(
        error_body(error, form),
        status_code=error.status_code,
        media_type="application/json",
        headers=all_headers,
    )


def _path_of(request: Request) -> str:
    """Return the requested path. `Request.url` fails for some Host headers."""
    return str(request.scope["path"])[:MAX_PATH_CHARS]


async def _on_request_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    return error_response(error)


async def _on_bus_error(_: Request, error: Exception) -> Response:
    log.warning("bus unavailable", error=repr(error))
    return error_response(unavailable("bus_unavailable", "the control plane cannot be reached"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{HTTPStatus(error.status_code).phrase}: {request.method} {_path_of(request)}"
    answer = RequestError(error.status_code, _CODES.get(error.status_code, "http_error"), message)
    return error_response(answer, error.headers, chat_form_of(request.scope["path"]))


async def _on_validation_error(_: Request, __: Exception) -> Response:
    return error_response(RequestError(400, "invalid_request", "the request is not valid"))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected error", path=_path_of(request), error=repr(error))
    return error_response(RequestError(500, "internal_error", "the gateway failed to serve this request"))


def install_error_handlers(app: FastAPI) -> None:
    """Send every error of `app`, framework errors included, in OpenAI's format or its path's."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(BusUnavailableError, _on_bus_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected)
