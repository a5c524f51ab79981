"""Video and audio in requests: which parts there are, what bytes they hold, how many a model takes."""

from base64 import b64encode
from typing import Any

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.content_parts import MediaPart, find_media
from triptych_gateway.request.image_header import ImageLimits
from triptych_gateway.request.item_checks import MediaLimits, bytes_of, check_counts, check_media

WAV = b"RIFF\x24\0\0\0WAVEfmt "
MP4 = b"\0\0\0\x20ftypisom\0\0\2\0"
LIMITS = MediaLimits(max_item_bytes=100, image=ImageLimits(max_pixels=10_000, formats=("PNG",)))


def text(content: bytes) -> str:
    return b64encode(content).decode()


def parts(*content: Any) -> list[MediaPart]:
    return list(find_media(("messages", 0, "content"), list(content), 0))


def refused(status_code: int = 400) -> Any:
    return pytest.raises(RequestError, check=lambda error: error.status_code == status_code)


def test_every_kind_of_part_in_the_order_of_the_prompt() -> None:
    found = parts(
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{text(MP4)}"}},
        {"type": "text", "text": "between"},
        {"type": "input_audio", "input_audio": {"data": text(WAV), "format": "wav"}},
        {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{text(WAV)}"},
    )
    assert [(part.item_index, part.place[-1], part.modality) for part in found] == [
        (0, 0, Modality.VIDEO),
        (1, 2, Modality.AUDIO),
        (2, 3, Modality.AUDIO),
    ]
    assert [part.path.partition("].content")[2] for part in found] == [
        "[0].video_url.url",
        "[2].input_audio.data",
        "[3].audio_url",
    ]
    assert [bytes_of(part, 100) for part in found] == [MP4, WAV, WAV]
    assert [check_media(part, bytes_of(part, 100), LIMITS) for part in found] == [None, None, None]


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "video_url"}, "missing_video_url"),
        ({"type": "audio_url", "audio_url": {}}, "missing_audio_url"),
        ({"type": "input_audio"}, "missing_audio"),
        ({"type": "input_audio", "input_audio": text(WAV)}, "missing_audio"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "missing_audio"),
        ({"type": "input_video", "input_video": "x"}, "unsupported_content_part"),
        ({"type": "text", "text": "x", "video_url": "data:,"}, "unexpected_field"),
        ({"type": "text", "text": "x", "input_audio": {}}, "unexpected_field"),
    ],
)
def test_parts_that_are_refused(part: dict[str, Any], code: str) -> None:
    with refused() as caught:
        parts(part)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "video_url", "video_url": f"data:audio/wav;base64,{text(WAV)}"}, "invalid_video"),
        ({"type": "audio_url", "audio_url": {"url": "ftp://x/y"}}, "invalid_audio_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAA!"}}, "invalid_base64"),
        ({"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,AAAA"}}, "invalid_base64"),
        ({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{text(WAV)}"}}, "invalid_video"),
        ({"type": "input_audio", "input_audio": {"data": text(b"#EXTM3U")}}, "invalid_audio"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text(MP4)}"}}, "invalid_image"),
    ],
)  # fmt: skip
def test_bytes_that_are_not_what_their_part_says(part: dict[str, Any], code: str) -> None:
    (found,) = parts(part)
    with refused() as caught:
        check_media(found, bytes_of(found, 100), LIMITS)
    assert (caught.value.code, caught.value.param) == (code, found.path)


def test_audio_that_is_too_large() -> None:
    (found,) = parts({"type": "input_audio", "input_audio": {"data": text(bytes(101))}})
    with refused(413):
        bytes_of(found, 100)


VIDEO_PART = {"type": "video_url", "video_url": "data:,"}
IMAGE_PART = {"type": "image_url", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("content", "limits", "code"),
    [
        ([VIDEO_PART, IMAGE_PART, IMAGE_PART], {Modality.IMAGE: 2, Modality.VIDEO: 1}, None),
        ([VIDEO_PART], {}, None),
        ([IMAGE_PART, VIDEO_PART], {Modality.IMAGE: 2}, "unsupported_media"),
        ([IMAGE_PART, IMAGE_PART], {Modality.IMAGE: 1}, "too_many_items"),
    ],
)
def test_how_many_items_of_which_kind_a_model_takes(
    content: list[dict[str, Any]], limits: dict[Modality, int], code: str | None
) -> None:
    found = parts(*content)
    if code is None:
        check_counts(found, limits)
        return
    with refused() as caught:
        check_counts(found, limits)
    assert (caught.value.code, caught.value.param) == (code, found[1].path)
