"""LLaVA-1.5, and LLaVA-OneVision, which sees crops of an image beside the whole one."""

from pathlib import Path

from tests.support.families.makers.parts import text_config, token_id, vision_config
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model

IMAGE, VIDEO = "<image>", "<video>"
SIZE_PX = 84  # 6 x 6 patches
CROPS = [[84, 84], [84, 168], [168, 84], [168, 168]]
# transformers 5 saves these towers without a level of names that published checkpoints, and vLLM, have.
TOWER_NAMES = {"vision_tower.": "vision_tower.vision_model."}


def llava(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([IMAGE])
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(
            **vision_config(num_hidden_layers=3, image_size=SIZE_PX, projection_dim=64)
        ),
        text_config=hf.LlamaConfig(**text_config(tokenizer)),
        image_token_index=token_id(tokenizer, IMAGE),
        image_seq_length=36,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"shortest_edge": SIZE_PX}, crop_size={"height": SIZE_PX, "width": SIZE_PX}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image=f"{IMAGE}\n"),
    )
    save_model(folder, hf.LlavaForConditionalGeneration, config, processor, TOWER_NAMES)


def llava_onevision(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([IMAGE, VIDEO])
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**vision_config(image_size=SIZE_PX, vision_use_head=False)),
        text_config=hf.Qwen2Config(**text_config(tokenizer)),
        image_token_index=token_id(tokenizer, IMAGE),
        video_token_index=token_id(tokenizer, VIDEO),
        image_grid_pinpoints=CROPS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    size = {"height": SIZE_PX, "width": SIZE_PX}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=CROPS),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=36,
        vision_feature_select_strategy="full",
        chat_template=chat_template(image=f"{IMAGE}\n", video=f"{VIDEO}\n"),
    )
    save_model(folder, hf.LlavaOnevisionForConditionalGeneration, config, processor, TOWER_NAMES)
