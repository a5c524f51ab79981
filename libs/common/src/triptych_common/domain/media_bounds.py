"""What one video or one sound may cost, wherever it is decoded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VideoBounds:
    """What one video may cost."""

    max_s: float  # how long it lasts
    max_frame_pixels: int
    max_pixels: int  # of all frames that are given to the model
    max_file_pixels: int  # of all frames of the file: those in front of the last one are decoded, too
    timeout_s: float  # to decode them


@dataclass(frozen=True, slots=True)
class AudioBounds:
    """What one audio file may cost."""

    max_s: float  # how long it lasts
    max_bytes: int  # of its samples, decoded
