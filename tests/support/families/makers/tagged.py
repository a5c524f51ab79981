"""Gemma 3 and Mistral3: text stands around an item's embeddings, and in Mistral3 between its rows."""

from pathlib import Path

from tests.support.families.makers.llava import TOWER_NAMES
from tests.support.families.makers.parts import HEAD_SIZE, text_config, token_id, vision_config
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model


def gemma3(folder: Path) -> None:
    """Images go between blank lines, and runs of line ends are tokens: an item changes the text beside it."""
    import transformers as hf

    start, end, image = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    tokenizer = build_tokenizer(
        [start, end, image],
        named={"boi_token": start, "eoi_token": end, "image_token": image},
        plain=["\n" * count for count in range(1, 5)],
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**vision_config(image_size=112, vision_use_head=False)),
        text_config=hf.Gemma3TextConfig(**text_config(tokenizer, head_dim=HEAD_SIZE, sliding_window=512)),
        mm_tokens_per_image=16,
        tie_word_embeddings=False,  # published ones are tied; such weights at random repeat the last token
        boi_token_index=token_id(tokenizer, start),
        eoi_token_index=token_id(tokenizer, end),
        image_token_index=token_id(tokenizer, image),
        eos_token_id=tokenizer.eos_token_id,
    )
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size={"height": 112, "width": 112}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=chat_template(image=start),
    )
    save_model(folder, hf.Gemma3ForConditionalGeneration, config, processor, TOWER_NAMES)


def mistral3(folder: Path) -> None:
    """With the Pixtral tower as transformers has it."""
    import transformers as hf

    image = "[IMG]"
    tokenizer = build_tokenizer([image, "[IMG_BREAK]", "[IMG_END]"])
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**vision_config(image_size=224, head_dim=16)),
        text_config=hf.MistralConfig(**text_config(tokenizer, head_dim=HEAD_SIZE)),
        image_token_index=token_id(tokenizer, image),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    processor = hf.PixtralProcessor(
        image_processor=hf.PixtralImageProcessor(
            size={"longest_edge": 224}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=chat_template(image=image),
    )
    save_model(folder, hf.Mistral3ForConditionalGeneration, config, processor)
