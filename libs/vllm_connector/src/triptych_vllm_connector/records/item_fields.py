"""Fields of a processed item that the language model reads, and fields that only an encoder reads.

An engine without an encoder gets an item without its pixels and samples, whether from a record
(`recording`) or from media that it rendered itself (`replaying.MetadataOnly`). It computes the prompt's
positions from the fields that are left: without `second_per_grid_ts`, a video of Qwen2.5-VL has wrong ones.
So a field is dropped because it is named here, never because nothing is known of it.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

ENCODER_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "pixels, in patches, tiles or frames": frozenset(
            {
                "image_pixel_values", "image_tokens", "images", "images_crop", "input_image_embeds",
                "patch_pixel_values", "pixel_values", "pixel_values_flat", "pixel_values_flat_video",
                "pixel_values_videos", "video_pixel_values", "video_tokens",
            }
        ),
        "samples or spectrograms of audio": frozenset(
            {
                "audio_arrays", "audio_data", "audio_features", "input_audio_embeds",
                "input_audio_features", "input_features", "input_features_padded", "input_values",
                "speech_ids", "va_audio_features", "whisper_input_features",
            }
        ),
        "embeddings, which come from the store": frozenset({"audio_embeds", "image_embeds", "video_embeds"}),
        "masks and places of pixels or samples": frozenset(
            {
                "feature_attention_mask", "feature_exist_mask", "image_attention_mask", "image_input_idx",
                "image_masks", "image_token_pooling", "input_features_mask", "patch_positions",
                "patch_positions_videos", "pixel_attention_mask", "pixel_mask", "pixel_position_ids",
                "pixel_position_ids_videos", "video_token_pooling",
            }
        ),
        "sizes that only the encoder reads": frozenset(
            {
                "audio_feature_lens", "audio_features_cfg", "audio_length", "audio_token_len", "grids",
                "indicator_tokens", "length", "speech_lengths", "video_grids",
                "video_indicator_tokens",
            }
        ),
    }
)  # fmt: skip
"""Names of the encoder's fields in vLLM's models, by their contents."""

_ENCODER_NAMES = frozenset().union(*ENCODER_FIELDS.values())


def is_for_language_model(name: str, element: Any, declared: Collection[str]) -> bool:
    """True if an engine without an encoder keeps the field.

    Args:
        name: the field's name.
        element: the field, vLLM's `MultiModalFieldElem`. One that vLLM keeps off the GPU is read by the host.
        declared: fields of the modality that vLLM's parser says a language model needs.
    """
    return element.field.keep_on_cpu or name in declared or name not in _ENCODER_NAMES
