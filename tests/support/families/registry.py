"""Families by name. Another one is an entry here and a maker."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.support.families.family import Family, MediaKind
from tests.support.families.makers.llava import llava, llava_onevision
from tests.support.families.makers.omni import qwen2_5_omni, qwen3_omni
from tests.support.families.makers.published import qwen2_5_vl_7b
from tests.support.families.makers.qwen2_audio import qwen2_audio
from tests.support.families.makers.qwen_vl import qwen2_5_vl, qwen2_vl, qwen3_vl
from tests.support.families.makers.tagged import gemma3, mistral3
from tests.support.families.makers.tiled import idefics3, internvl
from tests.support.families.makers.whole import blip2, whisper

IMAGE, VIDEO, AUDIO = MediaKind.IMAGE, MediaKind.VIDEO, MediaKind.AUDIO
VISUAL, HEARING = frozenset({"visual"}), frozenset({"audio_tower"})
PROJECTED = frozenset({"vision_tower", "multi_modal_projector"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": Family(qwen2_vl, {IMAGE: 4, VIDEO: 2}, VISUAL),
        "qwen2_5_vl": Family(qwen2_5_vl, {IMAGE: 4, VIDEO: 2}, VISUAL),
        "qwen3_vl": Family(qwen3_vl, {IMAGE: 4, VIDEO: 2}, VISUAL),
        "llava": Family(llava, {IMAGE: 4}, PROJECTED),
        "llava_onevision": Family(llava_onevision, {IMAGE: 4, VIDEO: 2}, PROJECTED),
        "internvl": Family(internvl, {IMAGE: 4}, PROJECTED),
        "gemma3": Family(gemma3, {IMAGE: 4}, PROJECTED),
        "mistral3": Family(mistral3, {IMAGE: 4}, PROJECTED),
        "idefics3": Family(idefics3, {IMAGE: 4}, frozenset({"model.vision_model", "model.connector"})),
        "qwen2_audio": Family(qwen2_audio, {AUDIO: 4}, frozenset({"audio_tower", "multi_modal_projector"})),
        "qwen2_5_omni": Family(qwen2_5_omni, {IMAGE: 2, VIDEO: 1, AUDIO: 2}, VISUAL | HEARING),
        # One sound: vLLM pads several of different lengths together, and their encodings change with that.
        "qwen3_omni": Family(qwen3_omni, {IMAGE: 2, VIDEO: 1, AUDIO: 1}, VISUAL | HEARING),
    }
)

# No encoder serves them: all of a request is one engine's.
WHOLE_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"blip2": Family(blip2, {IMAGE: 1}), "whisper": Family(whisper, {AUDIO: 1})}
)
# As a user downloads it, but for its size.
PUBLISHED_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"qwen2_5_vl_7b": Family(qwen2_5_vl_7b, {IMAGE: 4, VIDEO: 2}, VISUAL)}
)
ALL_FAMILIES: Mapping[str, Family] = MappingProxyType({**FAMILIES, **WHOLE_FAMILIES, **PUBLISHED_FAMILIES})
