"""Checks that an item is what its part says, by first bytes and headers; nothing is decoded here.

An image's header is read and goes on with the job. Video and audio are known by the first bytes of their
container, so that no play list reaches a media framework; the encoder checks their length.
"""

from dataclasses import dataclass

from triptych_common.domain.containers import AUDIO_CONTAINERS, VIDEO_CONTAINERS, container_of
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader, ImageLimits, read_image_header
from triptych_gateway.request.polyglots import check_one_format
from triptych_gateway.request.split.data_url import check_decoded, decode_base64, decode_data_url

_CONTAINERS = {Modality.VIDEO: VIDEO_CONTAINERS, Modality.AUDIO: AUDIO_CONTAINERS}


@dataclass(frozen=True, slots=True)
class MediaLimits:
    max_item_bytes: int
    image: ImageLimits
    video_piece_rows: int = 0  # the fewest of a piece; 0: no video is divided


def bytes_of(part: MediaPart, max_bytes: int) -> bytes:
    """Return the bytes of an item in the request itself.

    Raises:
        RequestError: 400, or 413 when the media are larger than `max_bytes`.
    """
    if part.content is not None:
        return check_decoded(part.content, part.url, part.path, part.modality, max_bytes)
    if part.is_base64:
        return decode_base64(part.url, 0, part.path, part.modality, max_bytes)
    return decode_data_url(part.url, part.path, part.modality, max_bytes)


def check_media(part: MediaPart, content: bytes, limits: MediaLimits) -> ImageHeader | None:
    """Check an item; return an image's header, else None.

    Raises:
        RequestError: 400 or 413 naming the part.
    """
    if part.modality is Modality.IMAGE:
        image = read_image_header(content, part.path, limits.image)
        check_one_format(content, part.path, image.format)
        return image
    known = _CONTAINERS[part.modality]
    if container_of(content, known) is None:
        message = f"{part.path} is not {part.modality} of a known format: {', '.join(known)}"
        raise RequestError(400, f"invalid_{part.modality}", message, part.path)
    return None
