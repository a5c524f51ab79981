"""Qwen2-Audio: a Whisper encoder before a Qwen2."""

from pathlib import Path

from tests.support.families.makers.parts import audio_config, text_config, token_id
from tests.support.families.tokenizer import build_tokenizer, chat_template
from tests.support.families.weights import save_model

AUDIO, START, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
# A level of names that transformers 5 writes twice.
TEXT_NAMES = {"language_model.model.model.": "language_model.model."}


def qwen2_audio(folder: Path) -> None:
    import transformers as hf

    tokenizer = build_tokenizer([AUDIO, START, END])
    config = hf.Qwen2AudioConfig(
        audio_config=audio_config(),
        text_config=hf.Qwen2Config(**text_config(tokenizer)),
        audio_token_index=token_id(tokenizer, AUDIO),
    )
    processor = hf.Qwen2AudioProcessor(
        feature_extractor=hf.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=chat_template(audio=f"{START}{AUDIO}{END}\n"),
    )
    save_model(folder, hf.Qwen2AudioForConditionalGeneration, config, processor, TEXT_NAMES)
