"""Forms with audio, written anew."""

from typing import Any

from triptych_gateway.endpoints.table import FORWARDED
from triptych_gateway.proxy.audio_request import AudioRequest, read_audio_request

ENDPOINT = next(each for each in FORWARDED if each.path == "/v1/audio/transcriptions")
SOUND = b"RIFF\x00\x00\x00\x00WAVEfmt "
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\ntext\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + SOUND + b"\r\n--x--\r\n"
)


async def read(form: bytes) -> AudioRequest:
    async def receive() -> Any:
        return {"type": "http.request", "body": form}

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}
    return await read_audio_request(
        scope, receive, ENDPOINT, max_bytes=10_000, on_growth=lambda num_bytes: None
    )


async def test_equal_requests_have_equal_bodies() -> None:
    """By its body a request is known with which instances have ended."""
    first, second, other = [await read(form) for form in (FORM, FORM, FORM.replace(b"text", b"word"))]
    assert (first.form, first.content_type) == (second.form, second.content_type)
    assert first.form != other.form
