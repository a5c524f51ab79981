"""Qwen2.5-VL as it is published: the settings of Qwen/Qwen2.5-VL-7B-Instruct around a small random body.

The dtype, the processor's settings, the ids of special tokens, the chat template, the sizes of heads and the
positions are the published ones; layers are few and narrow. No hub is asked: of the vocabulary the first
tokens are the demo model's, and the others stand for no text that is ever encoded.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.families.tokenizer import DEMO_TOKENIZER
from tests.support.families.weights import SEED, spread

NUM_TEXT_TOKENS = 151_643
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
GENERATION = {
    "bos_token_id": 151_643,
    "pad_token_id": 151_643,
    "do_sample": True,
    "eos_token_id": [151_645, 151_643],
    "repetition_penalty": 1.05,
    "temperature": 0.1,
    "top_p": 0.001,
    "top_k": 1,
}
TEMPLATE = """\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}\
<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def qwen2_5_vl_7b(folder: Path) -> None:
    """Each file as the published folder has it, which holds no `video_preprocessor_config.json`."""
    import torch
    import transformers as hf

    torch.manual_seed(SEED)
    model = hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(**_config()))
    spread(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    files: dict[str, Any] = {
        "preprocessor_config.json": PREPROCESSOR,
        "generation_config.json": GENERATION,
        "chat_template.json": {"chat_template": TEMPLATE},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2TokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 131_072,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _config() -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": 152_064,
            "hidden_size": 256,  # 3584
            "intermediate_size": 512,  # 18944
            "num_hidden_layers": 2,  # 28
            "num_attention_heads": 2,  # 28, of 128 each
            "num_key_value_heads": 1,  # 4
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]
            },
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
        },
        "vision_config": {
            "depth": 4,  # 32
            "hidden_size": 160,  # 1280
            "intermediate_size": 428,  # 3420
            "num_heads": 2,  # 16, of 80 each
            "out_hidden_size": 256,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],  # every eighth
        },
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "vision_token_id": 151_654,
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _tokenizer() -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads(DEMO_TOKENIZER.read_text())
    special = {each["content"]: each for each in tokenizer["added_tokens"]}
    texts = [text for text in tokenizer["model"]["vocab"] if text not in special]
    texts += [f"<unused_{number}>" for number in range(NUM_TEXT_TOKENS - len(texts))]
    tokenizer["model"]["vocab"] = {text: number for number, text in enumerate(texts)}
    (like, *_) = special.values()
    tokenizer["added_tokens"] = [
        {**like, "id": NUM_TEXT_TOKENS + number, "content": text}
        for number, text in enumerate(SPECIAL_TOKENS)
    ]
    return tokenizer
