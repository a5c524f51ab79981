"""Containers of video and audio, by their first bytes; play lists are none."""

import pytest

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, VIDEO_CONTAINERS, container_of

MP4 = b"\0\0\0\x20ftypisom\0\0\2\0"
WEBM = b"\x1aE\xdf\xa3\x9fB\x86\x81\1B\x82\x84webm"
# 417 bytes each: 128 kbit/s at 44.1 kHz. The second kind: 8 kbit/s at 8 kHz, of MPEG-2.5, 72 bytes.
FRAME, SLOW_FRAME = b"\xff\xfb\x90\xc4" + bytes(413), b"\xff\xe3\x18\xc4" + bytes(68)


@pytest.mark.parametrize(
    ("head", "video", "audio"),
    [
        (MP4, "mp4", "mp4"),
        (WEBM, "webm", "webm"),
        (b"RIFF\x24\0\0\0AVI LIST", "avi", None),
        (b"RIFF\x24\0\0\0WAVEfmt ", None, "wav"),
        (b"RF64\xff\xff\xff\xffWAVEds64", None, "wav"),
        (b"RIFF\x24\0\0\0WEBPVP8 ", None, None),
        (b"fLaC\0\0\0\x22", None, "flac"),
        (b"OggS\0\2", None, "ogg"),
        (b"ID3\4\0\0\0\0\2\1", None, "mp3"),
        (b"ID3\4\0\0\xff\0\2\1", None, None),
        (b"OggSx\nc=IN IP4 10.0.0.1\n", None, None),
        (b"OggS\0\0", None, None),
        (b"\x1aE\xdf\xa3 nothing", None, None),
        (b"\xff\xff\xff\xffftypisom", None, None),
        (b"\xff\xfb\x90\x00", None, "mp3"),
        (b"\xff\xf3\x40\xc4", None, "mp3"),
        (b"\xff\xfb\xf0\x00", None, None),  # a rate that does not exist
        (b"\xff\xeb\x90\x00", None, None),  # a version that does not exist
        (b"\xff\xf9\x50\x80", None, None),  # layer 0: ADTS
        (b"\xff\xfb\x9c\x00", None, None),  # a sampling rate that does not exist
        (bytes(4096) + 3 * FRAME, None, "mp3"),  # as some encoders pad
        (FRAME[100:] + 3 * FRAME, None, "mp3"),  # cut out of a stream
        (b"\xff\xfb\x90" + 3 * SLOW_FRAME, None, "mp3"),
        (b"x" + 3 * SLOW_FRAME, None, "mp3"),
        (b"x" + 2 * FRAME + FRAME[:2], None, None),
        (b"x" + FRAME + SLOW_FRAME + FRAME, None, None),
        (b"x" + 3 * FRAME[:-1], None, None),
        (bytes(HEAD_BYTES) + 3 * FRAME, None, None),
        (b"\xff", None, None),
        (b"", None, None),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://10.0.0.1/\n", None, None),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", None, None),
        (b"<?xml version='1.0'?><MPD>", None, None),
        (b"v=0\r\no=- 0 0 IN IP4 10.0.0.1\r\n", None, None),
        (b" " + MP4, None, None),
        (b"\x89PNG\r\n\x1a\n", None, None),
    ],
)
def test_what_a_file_is_by_its_first_bytes(head: bytes, video: str | None, audio: str | None) -> None:
    assert container_of(head, VIDEO_CONTAINERS) == video
    assert container_of(head, AUDIO_CONTAINERS) == audio
