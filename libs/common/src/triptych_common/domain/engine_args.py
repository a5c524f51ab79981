"""Values in vLLM's command-line options, in any spelling that its parser accepts. Pure."""

from collections.abc import Sequence
from itertools import pairwise


def option_value(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of `--name=value` or `--name value`; the last one counts. None if absent.

    `names` are those of one option, such as `--tensor-parallel-size` and `-tp`.
    """
    value = None
    for argument, following in pairwise([*arguments, ""]):
        if _name(argument) in names:
            value = argument.partition("=")[2] if "=" in argument else following or value
    return value


def _name(argument: str) -> str:
    """Return the name of an option as documents write it: vLLM takes `--max_model_len=1` too."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
