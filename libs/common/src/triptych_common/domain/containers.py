"""Containers of video and audio, known by their first bytes.

Media frameworks find out by themselves what a file is, and some of what they know are play lists that name
other files and addresses. So only files that begin like one of these reach them.
"""

from collections.abc import Callable, Mapping

HEAD_BYTES = 64  # that decide

Test = Callable[[bytes], bool]


def _at(offset: int, *signatures: bytes) -> Test:
    return lambda head: any(head.startswith(signature, offset) for signature in signatures)


def _riff(form: bytes) -> Test:
    return lambda head: head.startswith((b"RIFF", b"RF64")) and head[8:12] == form


def _is_mpeg_audio(head: bytes) -> bool:
    """An ID3 tag, or a frame's header: eleven bits of sync, a version, a layer and a rate that exist."""
    if head.startswith(b"ID3"):
        return True
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 != 0xF and head[2] >> 2 & 3 != 3


_ISO = _at(4, b"ftyp")  # MP4, MOV, M4A, 3GP
_EBML = _at(0, b"\x1aE\xdf\xa3")  # WebM, Matroska
VIDEO_CONTAINERS: Mapping[str, Test] = {"mp4": _ISO, "webm": _EBML, "avi": _riff(b"AVI ")}
AUDIO_CONTAINERS: Mapping[str, Test] = {
    "wav": _riff(b"WAVE"),
    "flac": _at(0, b"fLaC"),
    "ogg": _at(0, b"OggS"),
    "mp4": _ISO,
    "webm": _EBML,
    "mp3": _is_mpeg_audio,
}


def container_of(content: bytes, known: Mapping[str, Test]) -> str | None:
    """Which of `known` it begins like; None: none of them."""
    head = content[:HEAD_BYTES]
    return next((name for name, test in known.items() if test(head)), None)
