"""Gemma 3 and Mistral3: text stands around an item's embeddings, and in Mistral3 between its rows."""

from pathlib import Path

from tests.support.families.makers.llava import TOWER_NAMES
from tests.support.families.makers.parts import HEAD_SIZE, text_config, token_id, vision_config
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model


def gemma3(folder: Path) -> None:
    """Images go between blank lines, and runs of line ends are tokens: an item changes the text beside it."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessor,
        Gemma3Processor,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    start, end, image = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    tokenizer = build_tokenizer(
        [start, end, image],
        named={"boi_token": start, "eoi_token": end, "image_token": image},
        plain=["\n" * count for count in range(1, 5)],
    )
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**vision_config(image_size=112, vision_use_head=False)),
        text_config=Gemma3TextConfig(**text_config(tokenizer, head_dim=HEAD_SIZE, sliding_window=512)),
        mm_tokens_per_image=16,
        tie_word_embeddings=False,  # published ones are tied; such weights at random repeat the last token
        boi_token_index=token_id(tokenizer, start),
        eoi_token_index=token_id(tokenizer, end),
        image_token_index=token_id(tokenizer, image),
        eos_token_id=tokenizer.eos_token_id,
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 112, "width": 112}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=chat_template(image=start),
    )
    save_model(folder, Gemma3ForConditionalGeneration, config, processor, TOWER_NAMES)


def mistral3(folder: Path) -> None:
    """With the Pixtral tower as transformers has it."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralImageProcessor,
        PixtralProcessor,
        PixtralVisionConfig,
    )

    image = "[IMG]"
    tokenizer = build_tokenizer([image, "[IMG_BREAK]", "[IMG_END]"])
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**vision_config(image_size=224, head_dim=16)),
        text_config=MistralConfig(**text_config(tokenizer, head_dim=HEAD_SIZE)),
        image_token_index=token_id(tokenizer, image),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": 224}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=chat_template(image=image),
    )
    save_model(folder, Mistral3ForConditionalGeneration, config, processor)
