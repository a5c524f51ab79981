"""Check of a file's media: by its first bytes, then by the checks of media in requests."""

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, VIDEO_CONTAINERS, container_of
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.item_checks import MediaLimits, check_media

SOUND_BRANDS = (b"M4A ", b"M4B ")  # of an MP4 that holds no pictures


def check_content(content: bytes, limits: MediaLimits) -> tuple[tuple[Modality, ...], ImageHeader | None]:
    """Return the modalities that the file can have, the likeliest first, and an image's header. Takes
    milliseconds.

    Raises:
        RequestError: 400 or 413, it is no image, video or audio that is served.
    """
    kinds = modalities_of(content[:HEAD_BYTES])
    header = check_media(MediaPart(0, (), kinds[0], "", "file"), content, limits)
    return kinds, header


def modalities_of(head: bytes) -> tuple[Modality, ...]:
    """Return modalities by the first bytes: neither video nor audio counts as an image, checked next.

    MP4 and WebM can be video or audio.
    """
    kinds = []
    if container_of(head, VIDEO_CONTAINERS) is not None:
        kinds.append(Modality.VIDEO)
    if container_of(head, AUDIO_CONTAINERS) is not None:
        kinds.append(Modality.AUDIO)
    if head[4:12] in [b"ftyp" + brand for brand in SOUND_BRANDS]:
        kinds.reverse()
    return tuple(kinds) or (Modality.IMAGE,)
