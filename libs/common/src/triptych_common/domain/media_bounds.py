"""Bounds of one media item's cost, and its allowed codecs, wherever it is decoded."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

# FFmpeg's names. av1 is among them although OpenCV's own FFmpeg cannot decode it: others can.
VIDEO_CODECS = (
    "av1",
    "h263",
    "h264",
    "hevc",
    "mjpeg",
    "mpeg1video",
    "mpeg2video",
    "mpeg4",
    "png",  # also covers of videos
    "prores",
    "theora",
    "vp8",
    "vp9",
)
AUDIO_CODECS = (
    "aac",
    "ac3",
    "adpcm_ima_wav",
    "adpcm_ms",
    "alac",
    "flac",
    "mp2",
    "mp3",
    "opus",
    "pcm_*",
    "vorbis",
)
# Pillow's names.
TIFF_COMPRESSIONS = (
    *("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "group3", "group4"),
    "jpeg",  # as scanners write colors
)


@dataclass(frozen=True, slots=True)
class DecodingBounds:
    """Bounds of decoding one item in a child process, and the codecs that are decoded at all."""

    video_codecs: tuple[str, ...] = VIDEO_CODECS
    audio_codecs: tuple[str, ...] = AUDIO_CODECS
    tiff_compressions: tuple[str, ...] = TIFF_COMPRESSIONS
    num_processes: int = 2
    cpu_s: int = 120  # CPU seconds of all threads of the child
    num_bytes: int = 1 << 30  # memory of the child beyond its own
    timeout_s: float = 18.0  # without the time in which the child waited for a core


def refused_codec(codecs: Iterable[str], allowed: Iterable[str]) -> str | None:
    """Return the first of `codecs` that no pattern of `allowed` matches; None: all are allowed."""
    patterns = tuple(allowed)
    return next((each for each in codecs if not any(fnmatchcase(each, one) for one in patterns)), None)


@dataclass(frozen=True, slots=True)
class VideoBounds:
    max_s: float  # longest duration
    max_frame_pixels: int
    max_pixels: int  # all frames that are given to the model
    max_file_pixels: int  # all frames of the file: those before the last one used are decoded too


@dataclass(frozen=True, slots=True)
class AudioBounds:
    max_s: float  # longest duration
    max_bytes: int  # all samples, decoded
