"""Qwen2.5-Omni and Qwen3-Omni without their voices: the part that vLLM serves is called the thinker."""

import json
from pathlib import Path
from typing import Any

from tests.support.families.makers.parts import (
    HEAD_SIZE,
    HIDDEN_SIZE,
    audio_config,
    mrope,
    text_config,
    token_id,
)
from tests.support.families.makers.qwen_vl import deepstack_tower_config, pixel_bounds, windowed_tower_config
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model

THINKER_NAMES = {"": "thinker."}
QWEN2_5_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
QWEN3_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def qwen2_5_omni(folder: Path) -> None:
    import transformers as hf

    named = QWEN2_5_TOKENS
    tokenizer = build_tokenizer([*named.values()], named=named)
    ids = _tokens(tokenizer, named)
    # vLLM reads the ids of placeholders under the older names, transformers under the newer.
    indexes = {name.replace("_id", "_index"): ids[name] for name in ids if name.count("_") == 2}
    config = hf.Qwen2_5OmniThinkerConfig(
        audio_config=audio_config(output_dim=HIDDEN_SIZE, n_window=100),
        vision_config=windowed_tower_config(),
        text_config=text_config(tokenizer, rope_parameters=mrope()),
        position_id_per_seconds=25,
        seconds_per_chunk=2,
        **ids,
        **indexes,
    )
    processor = hf.Qwen2_5OmniProcessor(tokenizer=tokenizer, **_processor_parts(named, patch_size=14))
    save_model(folder, hf.Qwen2_5OmniThinkerForConditionalGeneration, config, processor, THINKER_NAMES)
    _wrap_config(folder, "qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration")


def qwen3_omni(folder: Path) -> None:
    import transformers as hf

    named = QWEN3_TOKENS
    tokenizer = build_tokenizer([*named.values()], named=named)
    text = text_config(
        tokenizer,
        num_hidden_layers=3,
        head_dim=HEAD_SIZE,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters=mrope(mrope_interleaved=True),
    )
    config = hf.Qwen3OmniMoeThinkerConfig(
        audio_config=audio_config(output_dim=HIDDEN_SIZE, n_window=50, downsample_hidden_size=32),
        vision_config=deepstack_tower_config(),
        text_config=text,
        position_id_per_seconds=13,
        user_token_id=token_id(tokenizer, "user"),
        **_tokens(tokenizer, named),
    )
    config.vision_config.image_size = 256  # vLLM asks for both, and transformers' class has neither
    config.vision_config.apply_vit_abs_pos_embed = True
    processor = hf.Qwen3OmniMoeProcessor(tokenizer=tokenizer, **_processor_parts(named, patch_size=16))
    save_model(folder, hf.Qwen3OmniMoeThinkerForConditionalGeneration, config, processor, THINKER_NAMES)
    _wrap_config(folder, "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration")


def _tokens(tokenizer: Any, named: dict[str, str]) -> dict[str, int]:
    ids = {name: token_id(tokenizer, token) for name, token in named.items()}
    return {
        "image_token_id": ids["image_token"],
        "video_token_id": ids["video_token"],
        "audio_token_id": ids["audio_token"],
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }


def _processor_parts(named: dict[str, str], patch_size: int) -> dict[str, Any]:
    import transformers as hf

    vision = f"{named['vision_bos_token']}@{named['vision_eos_token']}"
    audio = f"{named['audio_bos_token']}@{named['audio_eos_token']}"
    return {
        "image_processor": hf.Qwen2VLImageProcessor(**pixel_bounds(patch_size)),
        "video_processor": hf.Qwen2VLVideoProcessor(**pixel_bounds(patch_size)),
        "feature_extractor": hf.WhisperFeatureExtractor(feature_size=128),
        "chat_template": chat_template(
            image=vision.replace("@", named["image_token"]),
            video=vision.replace("@", named["video_token"]),
            audio=audio.replace("@", named["audio_token"]),
        ),
    }


def _wrap_config(folder: Path, model_type: str, architecture: str) -> None:
    """The thinker's config becomes a part of the whole model's."""
    file = folder / "config.json"
    whole = {
        "model_type": model_type,
        "architectures": [architecture],
        "enable_audio_output": False,
        "thinker_config": json.loads(file.read_text()),
    }
    file.write_text(json.dumps(whole, indent=1))
