"""Settings of media that gateway, encoder and prefill_decode share: formats, sizes and options.

Those that decode media share the bounds of what decoding may cost, too.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints

from triptych_common.domain.media_bounds import (
    AUDIO_CODECS,
    TIFF_COMPRESSIONS,
    VIDEO_CODECS,
    DecodingBounds,
    VideoBounds,
)
from triptych_common.domain.media_options import OptionBounds, OptionRules
from triptych_common.protocol.messages import IMAGE_FORMAT_PATTERN, Modality
from triptych_common.runtime.settings import ServiceSettings

# Names of Pillow's formats. TGA, which has no signature, is tried when no other format is found.
IMAGE_FORMATS = (
    *("PNG", "JPEG", "WEBP", "GIF", "BMP"),
    *("TIFF", "AVIF", "JPEG2000", "PPM", "QOI", "ICO", "TGA"),
)
MAX_IMAGE_PIXELS = 64_000_000

DECODING_SHARE = 0.9
"""Share of `preprocess_timeout_s` after which a decoder that does not end fails its item, without a retry."""
Codec = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*-]{1,64}$")]


class MediaSettings(ServiceSettings):
    """Settings that gateway, encoder and prefill_decode each enforce: none trusts another's checks."""

    config_section = "media"

    image_formats: tuple[Annotated[str, StringConstraints(pattern=IMAGE_FORMAT_PATTERN)], ...] = Field(
        default=IMAGE_FORMATS, min_length=1
    )
    """JSON list of the image formats that are accepted and decoded, by Pillow's names."""
    request_processor_options: dict[str, OptionBounds] = Field(default_factory=dict)
    """JSON object of the options of `mm_processor_kwargs` that requests may set, with their bounds. Empty:
    none; instances with a vision tower refuse any."""
    request_image_options: dict[str, OptionBounds] = Field(default_factory=dict)
    """JSON object of the options of `media_io_kwargs.image` that requests may set, with their bounds. Empty:
    none; instances with a vision tower refuse any."""
    request_video_options: dict[str, OptionBounds] = Field(default_factory=dict)
    """JSON object of the options of `media_io_kwargs.video` that requests may set, with their bounds. Empty:
    none; instances with a vision tower refuse any."""
    request_audio_options: dict[str, OptionBounds] = Field(default_factory=dict)
    """JSON object of the options of `media_io_kwargs.audio` that requests may set, with their bounds. Empty:
    none; instances with a vision tower refuse any."""

    @property
    def media_options(self) -> Mapping[Modality, OptionRules]:
        """Options of `media_io_kwargs` that requests may set."""
        return {
            Modality.IMAGE: self.request_image_options,
            Modality.VIDEO: self.request_video_options,
            Modality.AUDIO: self.request_audio_options,
        }


class DecodingSettings(MediaSettings):
    """Encoder, and prefill_decode where it has a tower."""

    config_section = "decoding"

    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Pixels, width times height, of the largest image or video frame that is decoded; larger are refused."""
    max_video_s: PositiveFloat = 600.0
    """Duration in seconds of the longest video that is decoded; longer ones are refused."""
    max_video_pixels: PositiveInt = 256_000_000
    """Pixels of all frames of a video that are given to the model, 3 bytes each; more are refused."""
    max_video_file_pixels: PositiveInt = 16_000_000_000
    """Pixels of all frames of a video's file; more are refused. Frames before the last one that the model
    gets are decoded too."""
    preprocess_timeout_s: PositiveFloat = 20.0
    """Seconds to decode and preprocess one item, with the wait for the model's processor, which takes one
    item at a time; then its job fails and can be retried."""
    video_codecs: tuple[Codec, ...] = VIDEO_CODECS
    """JSON list of the video codecs that are decoded, by FFmpeg's names or patterns; others: 400
    `invalid_video`."""
    audio_codecs: tuple[Codec, ...] = AUDIO_CODECS
    """JSON list of the audio codecs that are decoded, by FFmpeg's names or patterns like `pcm_*`; others are
    refused with 400."""
    tiff_compressions: tuple[Codec, ...] = TIFF_COMPRESSIONS
    """JSON list of the compressions of TIFF images that are decoded, by Pillow's names, where `image_formats`
    has TIFF."""
    decode_processes: PositiveInt = 2
    """Child processes that decode videos, audio and rare images at once; started on demand, 70 MiB each."""
    decode_cpu_s: PositiveInt = 120
    """CPU seconds of all threads to decode one item in a child process; then the item is refused."""
    decode_memory_bytes: PositiveInt = 1 << 30
    """Bytes of memory that a decoding child process may take beyond its own 70 MiB; an item that needs more
    is refused."""

    @property
    def video_bounds(self) -> VideoBounds:
        return VideoBounds(
            max_s=self.max_video_s,
            max_frame_pixels=self.max_image_pixels,
            max_pixels=self.max_video_pixels,
            max_file_pixels=self.max_video_file_pixels,
        )

    @property
    def decoding_bounds(self) -> DecodingBounds:
        return DecodingBounds(
            video_codecs=self.video_codecs,
            audio_codecs=self.audio_codecs,
            tiff_compressions=self.tiff_compressions,
            num_processes=self.decode_processes,
            cpu_s=self.decode_cpu_s,
            num_bytes=self.decode_memory_bytes,
            timeout_s=DECODING_SHARE * self.preprocess_timeout_s,
        )
