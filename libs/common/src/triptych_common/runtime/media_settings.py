"""Settings that gateway, encoder and prefill_decode share: formats, sizes and options of callers' media."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, StringConstraints

from triptych_common.domain.image_formats import IMAGE_FORMATS
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
