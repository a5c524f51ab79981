"""Number of scans in a JPEG. Pure.

A scan of a progressive JPEG costs its decoder a pass over every block of the image, and hardly any bytes.
Segments are passed over by their length, and what follows the image's end is not read: photographs
carry previews, depth maps and videos there.
"""

import re

MAX_JPEG_SCANS = 64  # encoders make about ten
MAX_JPEG_MARKERS = 32_768  # the longest colour profile and metadata take some hundred segments
WINDOW_BYTES = 1 << 20  # searched at a time: other threads run in between

# Neither a stuffed byte, nor a restart within a scan, nor a filler.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_FIRST_WITH_LENGTH = 0xC0
_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN = 0xD8, 0xD9, 0xDA


def has_too_many_scans(jpeg: bytes) -> bool:
    """Return whether decoding `jpeg` takes more than `MAX_JPEG_SCANS` passes over it."""
    return num_jpeg_scans(jpeg) > MAX_JPEG_SCANS


def num_jpeg_scans(jpeg: bytes) -> int:
    """Return the passes over the image that decoding `jpeg` takes, `MAX_JPEG_SCANS` + 1 at most.

    More than `MAX_JPEG_MARKERS` markers count as too many scans. For files that a decoder refuses, any number
    may be returned.
    """
    position = num_scans = 0
    for _ in range(MAX_JPEG_MARKERS):
        found = _next_marker(jpeg, position)
        if found is None:
            return num_scans
        marker, position = jpeg[found + 1], found + 2
        if marker == _END_OF_IMAGE and num_scans > 0:  # before the first scan it ends a set of tables
            return num_scans
        if marker == _START_OF_SCAN:
            num_scans += 1
            if num_scans > MAX_JPEG_SCANS:
                return num_scans
        if marker >= _FIRST_WITH_LENGTH and marker not in (_START_OF_IMAGE, _END_OF_IMAGE):
            position += max(int.from_bytes(jpeg[position : position + 2]), 2)
    return MAX_JPEG_SCANS + 1


def _next_marker(jpeg: bytes, position: int) -> int | None:
    while position < len(jpeg):
        end = position + WINDOW_BYTES
        match = _MARKER.search(jpeg, position, end + 1)  # a marker may begin with the window's last byte
        if match is not None:
            return match.start()
        position = end
    return None
