"""Settings that gateway, encoder and prefill_decode share: formats, sizes and options of callers' media.

Those that decode media share the bounds of what decoding may cost, too.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints

from triptych_common.domain.image_formats import IMAGE_FORMATS, MAX_IMAGE_PIXELS
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

DECODING_SHARE = 0.9
"""Of `preprocess_timeout_s`, so that a decoder that does not end is the item's fault, and not tried again."""
Codec = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*-]{1,64}$")]


class MediaSettings(ServiceSettings):
    """Gateway, encoder and prefill_decode each hold to them: none trusts what another one passes on."""

    config_section = "media"

    image_formats: tuple[Annotated[str, StringConstraints(pattern=IMAGE_FORMAT_PATTERN)], ...] = Field(
        default=IMAGE_FORMATS, min_length=1, description="formats that are read, by Pillow's names"
    )
    request_processor_options: dict[str, OptionBounds] = Field(
        default_factory=dict, description="options of mm_processor_kwargs that requests may set, with bounds"
    )
    request_image_options: dict[str, OptionBounds] = Field(
        default_factory=dict,
        description="options of media_io_kwargs for images that requests may set, with bounds",
    )
    request_video_options: dict[str, OptionBounds] = Field(
        default_factory=dict, description="likewise for videos, for example fps and num_frames"
    )
    request_audio_options: dict[str, OptionBounds] = Field(
        default_factory=dict, description="likewise for audio"
    )

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

    max_image_pixels: PositiveInt = Field(
        default=MAX_IMAGE_PIXELS, description="width times height of the largest image that is decoded"
    )
    max_video_s: PositiveFloat = Field(default=600.0, description="how long a video may last")
    max_video_pixels: PositiveInt = Field(
        default=256_000_000, description="of all frames of a video that are given to the model"
    )
    max_video_file_pixels: PositiveInt = Field(
        default=16_000_000_000, description="of all frames of a video's file; most of them are decoded"
    )
    preprocess_timeout_s: PositiveFloat = Field(
        default=20.0, description="to decode and preprocess one item; then its job fails"
    )
    video_codecs: tuple[Codec, ...] = Field(
        default=VIDEO_CODECS, description="codecs of videos that are decoded, by FFmpeg's names, or patterns"
    )
    audio_codecs: tuple[Codec, ...] = Field(
        default=AUDIO_CODECS, description="codecs of audio that are decoded, by FFmpeg's names, or patterns"
    )
    tiff_compressions: tuple[Codec, ...] = Field(
        default=TIFF_COMPRESSIONS,
        description="where image_formats has TIFF: compressions that are decoded, by Pillow's names",
    )
    decode_processes: PositiveInt = Field(
        default=2, description="child processes that decode videos, audio and rare images at once"
    )
    decode_cpu_s: PositiveInt = Field(
        default=120, description="CPU seconds of all threads, to decode one item in a child process"
    )
    decode_memory_bytes: PositiveInt = Field(
        default=1 << 30, description="memory of a child process that decodes, beyond its own 70 MiB"
    )

    @property
    def video_bounds(self) -> VideoBounds:
        """What one video may cost."""
        return VideoBounds(
            max_s=self.max_video_s,
            max_frame_pixels=self.max_image_pixels,
            max_pixels=self.max_video_pixels,
            max_file_pixels=self.max_video_file_pixels,
        )

    @property
    def decoding_bounds(self) -> DecodingBounds:
        """Return the bounds of decoding in child processes."""
        return DecodingBounds(
            video_codecs=self.video_codecs,
            audio_codecs=self.audio_codecs,
            tiff_compressions=self.tiff_compressions,
            num_processes=self.decode_processes,
            cpu_s=self.decode_cpu_s,
            num_bytes=self.decode_memory_bytes,
            timeout_s=DECODING_SHARE * self.preprocess_timeout_s,
        )
