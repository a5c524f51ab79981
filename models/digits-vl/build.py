"""The model folder without its training: tokenizer, processor, template, config.

`build_processor` and `build_model` are what `train.py` starts from. Run as a
script, this writes a folder with random weights, which is enough where only
the shapes matter:

    python build.py --out folder
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import dialogues
import torch
from cpu_imports import prepare_imports

prepare_imports()

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

VOCAB_SIZE = 1024
MIN_PIXELS = 28 * 28
MAX_PIXELS = 1024 * 1024
MAX_POSITION_EMBEDDINGS = 8192

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (
    END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD,
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] in ('video', 'video_url') -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer; every byte has a token, so any text has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(dialogues.tokenizer_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Return tokenizer, image and video processor and chat template as one."""
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return the untrained model, float32."""

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            # The column of a digit matters and its row hardly does: all but the two highest
            # frequencies go to the width.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 14],
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token_id(TURN_END),
            "pad_token_id": token_id(END_OF_TEXT),
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [0, 1, 2],
        },
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config)


def save_folder(
    folder: Path, model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor
) -> None:
    """Write everything that transformers and vLLM read.

    The weights become bfloat16: vLLM makes that of float32 weights anyway, so
    nothing would be gained by a larger file. The generation config is written
    by hand: `temperature` 0 is how vLLM is told to be greedy by default, and
    transformers refuses to save it.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 600
    processor.save_pretrained(folder)
    tokenizer = processor.tokenizer
    generation = {
        "do_sample": False,
        "temperature": 0.0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model folder with random weights.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    processor = build_processor()
    save_folder(args.out, build_model(processor.tokenizer, args.seed), processor)


if __name__ == "__main__":
    main()
