"""Audio form for a transcription or translation: read within bounds and written anew.

What goes to prefill_decode is a form of the gateway's own, of the fields that callers may set and the file's
bytes: how a client's form was written is read by one parser alone, and no field passes unseen.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, container_of
from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.files.upload_form import FILE_FIELD, UploadForm
from triptych_gateway.request.chat_request import read_flag
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.request_body import body_too_large, header_of

MAX_NAME_CHARS = 100  # of a field, in an error
COUNT_FIELD = "max_completion_tokens"
_BOUNDARY = secrets.token_hex(16)
"""Boundary of all forms of this process, told to instances alone: equal requests have equal bodies, by which
`routing.instances.LostRequests` knows them."""


@dataclass(frozen=True, slots=True)
class AudioRequest:
    body: dict[str, Any]  # fields that the gateway reads
    form: bytes  # form to send
    content_type: str
    model: str  # "": the caller names none
    stream: bool
    inputs: tuple[str, ...]
    num_prompt_bytes: int
    num_media_bytes: int
    has_salt: bool = False
    media: tuple[MediaPart, ...] = ()  # none goes to encoders

    def check_count(self) -> None:
        """Check that the longest answer is set: no answer reports its usage, so only this counts.

        Raises:
            RequestError: 400, it is not.
        """
        if not self.body.get(COUNT_FIELD):
            message = f"{COUNT_FIELD} must be set for audio: this API key has a limit of tokens"
            raise RequestError(400, "missing_field", message, COUNT_FIELD)

    def check_placeholders(self, tokens: Iterable[str]) -> None:
        PlaceholderGuard(tuple(tokens)).check_texts(self.body, (), self.inputs)

    def of_tenant(self, salt: str) -> "AudioRequest":
        """Return a copy for a tenant, as `ChatRequest.of_tenant` does; no field carries the salt."""
        return replace(self, has_salt=bool(salt))


async def read_audio_request(
    scope: Scope,
    receive: Receive,
    endpoint: Endpoint,
    *,
    max_bytes: int,
    on_growth: Callable[[int], None],
    resolve: Callable[[str], str] = str,
) -> AudioRequest:
    """Read the whole form of the ASGI request `scope`. Bound it.

    Args:
        endpoint: endpoint with the fields that callers may set.
        on_growth: called with a number of bytes before the form takes them; may raise.
        resolve: gives the model that a name stands for.

    Raises:
        RequestError: 400 the form, a field or the sound is not valid; 413 too large.
        ClientDisconnect: the client went away.
    """
    form, sound, num_bytes = UploadForm.of_content_type(header_of(scope, b"content-type")), bytearray(), 0
    async for chunk in Request(scope, receive).stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise body_too_large(max_bytes)
        on_growth(2 * num_bytes)  # as it came, and in the form that is sent
        for piece in form.feed(chunk):
            sound += piece
    form.finish()
    fields = dict(form.fields)
    if "model" in fields:
        fields["model"] = resolve(fields["model"])
    return _checked(fields, sound, endpoint)


def _checked(fields: Mapping[str, str], sound: bytearray, endpoint: Endpoint) -> AudioRequest:
    for name in fields:
        if name not in endpoint.passed_fields:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(400, "field_not_allowed", f"{shown} may not be set by callers", shown)
    if container_of(bytes(sound[:HEAD_BYTES]), AUDIO_CONTAINERS) is None:
        message = f"{FILE_FIELD} is not audio of a known format: {', '.join(AUDIO_CONTAINERS)}"
        raise RequestError(400, "invalid_audio", message, FILE_FIELD)
    form = _written(fields, sound, _BOUNDARY)
    count = fields.get(COUNT_FIELD, "")
    body: dict[str, Any] = {name: fields[name] for name in ("model", *endpoint.inputs) if name in fields}
    if count.isascii() and count.isdigit() and len(count) < 10:
        body[COUNT_FIELD] = int(count)
    return AudioRequest(
        body=body,
        form=form,
        content_type=f"multipart/form-data; boundary={_BOUNDARY}",
        model=fields.get("model", ""),
        stream=read_flag(fields.get("stream") or "false", "stream"),
        inputs=endpoint.inputs,
        num_prompt_bytes=len(form) - len(sound),
        num_media_bytes=len(sound),
    )


def _written(fields: Mapping[str, str], sound: bytearray, boundary: str) -> bytes:
    """Write the form; `boundary` is random and occurs in no content."""
    start = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    parts = [f'{start}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    head = f'{start}{FILE_FIELD}"; filename="audio"\r\nContent-Type: application/octet-stream\r\n\r\n'
    return b"".join((*parts, head.encode(), sound, f"\r\n--{boundary}--\r\n".encode()))
