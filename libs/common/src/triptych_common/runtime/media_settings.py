"""Settings that gateway, encoder and prefill_decode share: formats, sizes and options of callers' media.

Those that decode media share the bounds of what decoding may cost, too.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints

from triptych_common.domain.image_formats import IMAGE_FORMATS, MAX_IMAGE_PIXELS
from triptych_common.domain.media_bounds import VideoBounds
from triptych_common.domain.media_options import OptionBounds, OptionRules
from triptych_common.protocol.messages import IMAGE_FORMAT_PATTERN, Modality
from triptych_common.runtime.settings import ServiceSettings


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

    @property
    def video_bounds(self) -> VideoBounds:
        """What one video may cost."""
        return VideoBounds(
            max_s=self.max_video_s,
            max_frame_pixels=self.max_image_pixels,
            max_pixels=self.max_video_pixels,
            max_file_pixels=self.max_video_file_pixels,
            timeout_s=self.preprocess_timeout_s,
        )
