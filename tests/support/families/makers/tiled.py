"""InternVL and Idefics3: large images are cut into tiles, each of which the tower sees by itself."""

from pathlib import Path

from tests.support.families.makers.parts import text_config, token_id, vision_config
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model

TILE_PX = 112
MAX_TILES = 4
TOKENS_PER_TILE = 16


def internvl(folder: Path) -> None:
    import transformers as hf

    image = "<IMG_CONTEXT>"
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": image,
        "video_token": "<video>",
    }
    tokenizer = build_tokenizer([*named.values()], named=named)
    config = hf.InternVLConfig(
        vision_config=vision_config(image_size=[TILE_PX, TILE_PX], patch_size=[14, 14]),
        text_config=hf.Qwen2Config(**text_config(tokenizer)),
        image_token_id=token_id(tokenizer, image),
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    size = {"height": TILE_PX, "width": TILE_PX}
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(
            crop_to_patches=True, min_patches=1, max_patches=MAX_TILES, size=size
        ),
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(size=size),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=chat_template(image=f"{image}\n"),
    )
    save_model(folder, hf.InternVLForConditionalGeneration, config, processor)


def idefics3(folder: Path) -> None:
    import transformers as hf

    image = "<image>"
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = build_tokenizer(
        [image, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows]
    )
    config = hf.Idefics3Config(
        vision_config=vision_config(image_size=TILE_PX),
        text_config=hf.LlamaConfig(**text_config(tokenizer)),
        image_token_id=token_id(tokenizer, image),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(
            size={"longest_edge": 2 * TILE_PX}, max_image_size={"longest_edge": TILE_PX}
        ),
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template(image=image),
    )
    save_model(folder, hf.Idefics3ForConditionalGeneration, config, processor)
