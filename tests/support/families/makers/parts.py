"""What the makers share: the language model's shape, and tokens by their ids."""

from typing import Any

HIDDEN_SIZE = 128
HEAD_SIZE = 32  # the CPU's attention refuses 16
MROPE_SECTIONS = [4, 6, 6]  # of half a head: time, height, width
_VOCABULARY_STEP = 64


def text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """The fields that all language models have; `more` comes last."""
    return {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HIDDEN_SIZE // HEAD_SIZE,
        "num_key_value_heads": 2,
        "vocab_size": -(-len(tokenizer) // _VOCABULARY_STEP) * _VOCABULARY_STEP,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def vision_config(**more: Any) -> dict[str, Any]:
    """The fields that most vision towers have; `more` comes last."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 14,
        **more,
    }


def audio_config(**more: Any) -> dict[str, Any]:
    """A small Whisper encoder; `more` comes last."""
    return {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        **more,
    }


def mrope(**more: Any) -> dict[str, Any]:
    """`rope_parameters` with positions of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": MROPE_SECTIONS, **more}


def token_id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))
