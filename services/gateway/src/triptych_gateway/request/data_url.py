"""`data:` URLs, strictly: what is not exactly a base64 data URL of an image is refused."""

import binascii
import re

from triptych_common.domain.errors import RequestError

_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?P<options>(?:;[^,;]*)*),", re.IGNORECASE)
_MAX_HEADER_CHARS = 256


def check_data_url(url: str, path: str) -> None:
    """Whether `url` is of this kind at all.

    Raises:
        RequestError: 400.
    """
    if url[:5].lower() != "data:":
        raise RequestError(400, "invalid_image_url", f"{path} must be a data URL or an http(s) URL", path)


def decode_data_url(url: str, path: str, max_bytes: int) -> bytes:
    """Bytes of an image given as a data URL.

    Args:
        path: where the URL stands in the request; errors name it.

    Raises:
        RequestError: 400, or 413 when the media are larger than `max_bytes`.
    """
    check_data_url(url, path)
    header = _DATA_URL.match(url[:_MAX_HEADER_CHARS])
    if header is None:
        raise RequestError(400, "invalid_image_url", f"{path} is not a well-formed data URL", path)
    options = header["options"].lower().split(";")
    if not header["type"].lower().startswith("image/") or options[-1] != "base64":
        message = f"{path} must start with data:image/<format>;base64,"
        raise RequestError(400, "invalid_image_url", message, path)
    num_chars = len(url) - header.end()
    if num_chars // 4 * 3 > max_bytes + 2:
        raise too_large(path, max_bytes)
    try:
        media = binascii.a2b_base64(url[header.end() :].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(400, "invalid_base64", f"{path} is not valid base64", path) from error
    if len(media) > max_bytes:
        raise too_large(path, max_bytes)
    if not media:
        raise RequestError(400, "invalid_image", f"{path} holds no data", path)
    return media


def too_large(path: str, max_bytes: int) -> RequestError:
    """413 for one media item."""
    return RequestError(413, "media_too_large", f"{path} is larger than {max_bytes} bytes", path)
