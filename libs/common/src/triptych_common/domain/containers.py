"""Containers of video and audio, known by their first bytes.

Media frameworks find out by themselves what a file is, and some of what they know are play lists that name
other files and addresses. So only files that begin like one of these reach them.
"""

from collections.abc import Callable, Mapping

HEAD_BYTES = 64  # that decide
MAX_FTYP_BYTES = 1024

Test = Callable[[bytes], bool]


def _riff(form: bytes) -> Test:
    return lambda head: head.startswith((b"RIFF", b"RF64")) and head[8:12] == form


def _is_mpeg_audio(head: bytes) -> bool:
    """An ID3 tag, or a frame's header: eleven bits of sync, a version, a layer and a rate that exist."""
    if head.startswith(b"ID3"):
        return len(head) > 9 and head[3] in (2, 3, 4) and max(head[6:10]) < 0x80
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 != 0xF and head[2] >> 2 & 3 != 3


def _is_iso(head: bytes) -> bool:
    """MP4, MOV, M4A, 3GP: a box `ftyp` of a size that it can have."""
    return head[4:8] == b"ftyp" and 8 <= int.from_bytes(head[:4], "big") <= MAX_FTYP_BYTES


def _is_ebml(head: bytes) -> bool:
    """WebM, Matroska, by name."""
    return head.startswith(b"\x1aE\xdf\xa3") and (b"webm" in head or b"matroska" in head)


def _is_ogg(head: bytes) -> bool:
    """A first page, of version 0."""
    return head.startswith(b"OggS\0") and len(head) > 5 and bool(head[5] & 2)


VIDEO_CONTAINERS: Mapping[str, Test] = {"mp4": _is_iso, "webm": _is_ebml, "avi": _riff(b"AVI ")}
AUDIO_CONTAINERS: Mapping[str, Test] = {
    "wav": _riff(b"WAVE"),
    "flac": lambda head: head.startswith(b"fLaC\0"),
    "ogg": _is_ogg,
    "mp4": _is_iso,
    "webm": _is_ebml,
    "mp3": _is_mpeg_audio,
}


def container_of(content: bytes, known: Mapping[str, Test]) -> str | None:
    """Which of `known` it begins like; None: none of them."""
    head = content[:HEAD_BYTES]
    return next((name for name, test in known.items() if test(head)), None)
