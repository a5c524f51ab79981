"""The demo model's tokenizer with a family's own tokens, and a chat template that places its media."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEMO_TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "digits-vl" / "tokenizer.json"
END_OF_TEXT, TURN_END = "<|endoftext|>", "<|im_end|>"  # the demo model has them
MAX_LENGTH = 8192

_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
@MEDIA@
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


def build_tokenizer(
    special: Sequence[str], *, named: Mapping[str, str] | None = None, plain: Sequence[str] = ()
) -> Any:
    """Every text has tokens: those of the demo model, then `special` and `plain`, one each.

    Args:
        special: tokens that never come of text alone, such as placeholders.
        named: attributes by which the family's processor asks for some of them, e.g. `image_token`.
        plain: more tokens of text.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=dict(named or {}),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def chat_template(*, image: str = "", video: str = "", audio: str = "") -> str:
    """Turns as the demo model has them; each medium becomes the text that is given for its kind."""
    texts = {"image": image, "video": video, "audio": audio}
    tests = [f"part['type'] == '{kind}' -%}}\n{{{{ {text!r} }}}}" for kind, text in texts.items() if text]
    media = "\n".join(f"{{%- {'elif' if number else 'if'} {test}" for number, test in enumerate(tests))
    return _TEMPLATE.replace("@MEDIA@", f"{media}\n{{%- else -%}}")
