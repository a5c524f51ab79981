"""Families that no encoder serves: BLIP-2, whose images have no tokens in the text, and Whisper."""

from pathlib import Path

from tests.support.families.makers.parts import HEAD_SIZE, HIDDEN_SIZE, audio_config, text_config, token_id
from tests.support.families.makers.parts import vision_config as small_vision
from tests.support.families.tokenizer import build_tokenizer
from tests.support.families.weights import save_model

IMAGE = "<image>"
NUM_QUERIES = 8
SIZE_PX = 84  # 6 x 6 patches
START, END = "<|startoftranscript|>", "<|endoftext|>"
LANGUAGES = ("<|en|>", "<|de|>")
TASKS = ("<|transcribe|>", "<|translate|>", "<|prev|>", "<|notimestamps|>")


def blip2(folder: Path) -> None:
    """An image becomes `NUM_QUERIES` tokens at the prompt's start. It has no chat template: vLLM has one."""
    import transformers as hf

    tokenizer = build_tokenizer([IMAGE], named={"image_token": IMAGE})
    text = text_config(tokenizer)
    language = {
        name: text[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    }
    language |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = hf.Blip2Config(
        vision_config=hf.Blip2VisionConfig(**small_vision(image_size=SIZE_PX)).to_dict(),
        qformer_config=hf.Blip2QFormerConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            encoder_hidden_size=64,
        ).to_dict(),
        text_config=hf.OPTConfig(
            **language,
            ffn_dim=2 * HIDDEN_SIZE,
            word_embed_proj_dim=HIDDEN_SIZE,
            max_position_embeddings=8192,
            bos_token_id=tokenizer.pad_token_id,
        ).to_dict(),
        num_query_tokens=NUM_QUERIES,
        image_token_index=token_id(tokenizer, IMAGE),
    )
    size = {"height": SIZE_PX, "width": SIZE_PX}
    processor = hf.Blip2Processor(hf.BlipImageProcessor(size=size), tokenizer, num_query_tokens=NUM_QUERIES)
    save_model(folder, hf.Blip2ForConditionalGeneration, config, processor)


def whisper(folder: Path) -> None:
    """An encoder-decoder model."""
    import transformers as hf

    tokenizer = build_tokenizer([START, *LANGUAGES, *TASKS])
    text = text_config(tokenizer)
    num_heads = HIDDEN_SIZE // HEAD_SIZE
    config = hf.WhisperConfig(
        **audio_config(
            d_model=HIDDEN_SIZE,
            encoder_attention_heads=num_heads,
            encoder_ffn_dim=2 * HIDDEN_SIZE,
            num_mel_bins=80,
        ),
        decoder_layers=2,
        decoder_attention_heads=num_heads,
        decoder_ffn_dim=2 * HIDDEN_SIZE,
        vocab_size=text["vocab_size"],
        decoder_start_token_id=token_id(tokenizer, START),
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    processor = hf.WhisperProcessor(hf.WhisperFeatureExtractor(feature_size=80), tokenizer)
    save_model(folder, hf.WhisperForConditionalGeneration, config, processor)
