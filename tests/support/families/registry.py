"""All families, by name. Another one is an entry here and a maker."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.support.families.family import Family, MediaKind
from tests.support.families.makers.llava import llava, llava_onevision
from tests.support.families.makers.omni import qwen2_5_omni, qwen3_omni
from tests.support.families.makers.qwen2_audio import qwen2_audio
from tests.support.families.makers.qwen_vl import qwen2_5_vl, qwen2_vl, qwen3_vl
from tests.support.families.makers.tagged import gemma3, mistral3
from tests.support.families.makers.tiled import idefics3, internvl

IMAGE, VIDEO, AUDIO = MediaKind.IMAGE, MediaKind.VIDEO, MediaKind.AUDIO

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": Family(qwen2_vl, {IMAGE: 4, VIDEO: 2}),
        "qwen2_5_vl": Family(qwen2_5_vl, {IMAGE: 4, VIDEO: 2}),
        "qwen3_vl": Family(qwen3_vl, {IMAGE: 4, VIDEO: 2}),
        "llava": Family(llava, {IMAGE: 4}),
        "llava_onevision": Family(llava_onevision, {IMAGE: 4, VIDEO: 2}),
        "internvl": Family(internvl, {IMAGE: 4}),
        "gemma3": Family(gemma3, {IMAGE: 4}),
        "mistral3": Family(mistral3, {IMAGE: 4}),
        "idefics3": Family(idefics3, {IMAGE: 4}),
        "qwen2_audio": Family(qwen2_audio, {AUDIO: 4}),
        "qwen2_5_omni": Family(qwen2_5_omni, {IMAGE: 2, VIDEO: 1, AUDIO: 2}),
        # One sound: vLLM pads several of different lengths together, and their encodings change with that.
        "qwen3_omni": Family(qwen3_omni, {IMAGE: 2, VIDEO: 1, AUDIO: 1}),
    }
)
