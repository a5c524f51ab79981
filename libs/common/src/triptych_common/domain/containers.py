"""Containers of video and audio, known by their first bytes; MP3, which has none, by its first frames.

Media frameworks detect a file's format, and some formats are play lists that name other files and addresses.
Only files that begin like one of these reach the frameworks.
"""

import re
from collections.abc import Callable, Mapping
from itertools import islice

HEAD_BYTES = 1 << 16  # bytes that decide the format
MAX_FTYP_BYTES = 1024
MAX_EBML_BYTES = 64
MAX_MP3_STARTS = 1000  # places that are searched: the bytes are not trusted
NUM_MP3_FRAMES = 3  # one behind the other, which are no accident
_MP3_HEADER = re.compile(rb"(?=\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef])")  # layer III
_MP3_KBPS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_LOW_KBPS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # of MPEG-2 and 2.5
_MP3_HZ = (44_100, 48_000, 32_000)  # of MPEG-1

Test = Callable[[bytes], bool]


def _riff(form: bytes) -> Test:
    return lambda head: head.startswith((b"RIFF", b"RF64")) and head[8:12] == form


def _is_mpeg_audio(head: bytes) -> bool:
    """Find an ID3 tag, a frame header, or MP3 frames behind zeros or the rest of a frame, as FFmpeg does."""
    if head.startswith(b"ID3"):
        return len(head) > 9 and head[3] in (2, 3, 4) and max(head[6:10]) < 0x80
    starts = islice(_MP3_HEADER.finditer(head), MAX_MP3_STARTS)
    return _is_frame(head) or any(_are_mp3_frames(head, start.start()) for start in starts)


def _is_frame(head: bytes) -> bool:
    """Check a frame header: eleven bits of sync, and a version, layer and rate that exist."""
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 != 0xF and head[2] >> 2 & 3 != 3


def _are_mp3_frames(head: bytes, at: int) -> bool:
    """Check consecutive frames: each gives the place of the next, with equal version, layer and rate."""
    kind = head[at + 1] & 0xFE, head[at + 2] & 0x0C
    for _ in range(NUM_MP3_FRAMES - 1):
        is_mpeg_1, divisor = head[at + 1] & 8, (4, 0, 2, 1)[head[at + 1] >> 3 & 3]
        if kind[1] == 0x0C:
            return False
        kbps = (_MP3_KBPS if is_mpeg_1 else _MP3_LOW_KBPS)[(head[at + 2] >> 4) - 1]
        hz = _MP3_HZ[head[at + 2] >> 2 & 3] // divisor
        at += (144 if is_mpeg_1 else 72) * 1000 * kbps // hz + (head[at + 2] >> 1 & 1)
        if not _MP3_HEADER.match(head, at) or (head[at + 1] & 0xFE, head[at + 2] & 0x0C) != kind:
            return False
    return True


def _is_iso(head: bytes) -> bool:
    """Detect MP4, MOV, M4A or 3GP: a box `ftyp` of a possible size."""
    return head[4:8] == b"ftyp" and 8 <= int.from_bytes(head[:4], "big") <= MAX_FTYP_BYTES


def _is_ebml(head: bytes) -> bool:
    """Detect WebM or Matroska by name."""
    head = head[:MAX_EBML_BYTES]
    return head.startswith(b"\x1aE\xdf\xa3") and (b"webm" in head or b"matroska" in head)


def _is_ogg(head: bytes) -> bool:
    """Detect a first Ogg page of version 0."""
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
    """Return the container in `known` that `content` begins like, or None."""
    head = content[:HEAD_BYTES]
    return next((name for name, test in known.items() if test(head)), None)
