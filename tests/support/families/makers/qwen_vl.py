"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: an item is a grid of patches, and positions have three parts."""

from pathlib import Path
from typing import Any

from tests.support.families.makers.parts import HEAD_SIZE, HIDDEN_SIZE, mrope, text_config, token_id
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = chat_template(image=f"{START}{IMAGE}{END}", video=f"{START}{VIDEO}{END}")
MAX_PIXELS = 512 * 512


def tower_config(**more: Any) -> dict[str, Any]:
    """Of a Qwen vision tower; `more` comes last."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **more,
    }


def windowed_tower_config() -> dict[str, Any]:
    """Of Qwen2.5: all layers but the last one see windows."""
    return tower_config(window_size=112, fullatt_block_indexes=[1])


def deepstack_tower_config() -> dict[str, Any]:
    """Of Qwen3: two layers' outputs go to layers of the language model beside the last one's."""
    return tower_config(depth=3, patch_size=16, num_position_embeddings=256, deepstack_visual_indexes=[0, 1])


def pixel_bounds(patch_size: int = 14) -> dict[str, Any]:
    """For image and video processors: sizes in pixels of a whole item."""
    return {"patch_size": patch_size, "min_pixels": (4 * patch_size) ** 2, "max_pixels": MAX_PIXELS}


def qwen2_vl(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([START, END, IMAGE, VIDEO])
    config = hf.Qwen2VLConfig(
        text_config=text_config(tokenizer, rope_parameters=mrope()),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN_SIZE,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_tokens(tokenizer),
    )
    processor = hf.Qwen2VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**pixel_bounds()),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**pixel_bounds()),
        chat_template=TEMPLATE,
    )
    save_model(folder, hf.Qwen2VLForConditionalGeneration, config, processor)


def qwen2_5_vl(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([START, END, IMAGE, VIDEO])
    config = hf.Qwen2_5_VLConfig(
        text_config=text_config(tokenizer, rope_parameters=mrope()),
        vision_config={**windowed_tower_config(), "tokens_per_second": 2},
        **_tokens(tokenizer),
    )
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**pixel_bounds()),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**pixel_bounds()),
        chat_template=TEMPLATE,
    )
    save_model(folder, hf.Qwen2_5_VLForConditionalGeneration, config, processor)


def qwen3_vl(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([START, END, IMAGE, VIDEO])
    rope = mrope(mrope_interleaved=True)
    config = hf.Qwen3VLConfig(
        text_config=text_config(tokenizer, num_hidden_layers=3, head_dim=HEAD_SIZE, rope_parameters=rope),
        vision_config=deepstack_tower_config(),
        **_tokens(tokenizer),
    )
    pixels = {
        "patch_size": 16,
        "size": {"shortest_edge": 64 * 64, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=hf.Qwen3VLVideoProcessor(**pixels),
        chat_template=TEMPLATE,
    )
    save_model(folder, hf.Qwen3VLForConditionalGeneration, config, processor)


def _tokens(tokenizer: Any) -> dict[str, Any]:
    return {
        "image_token_id": token_id(tokenizer, IMAGE),
        "video_token_id": token_id(tokenizer, VIDEO),
        "vision_start_token_id": token_id(tokenizer, START),
        "vision_end_token_id": token_id(tokenizer, END),
        "tie_word_embeddings": False,
    }
