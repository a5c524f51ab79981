"""Facts of a request's body in its span: numbers and counts, never text of the caller's."""

from collections.abc import Callable, Mapping
from typing import Any

from triptych_gateway.tracing import attributes

_INT64 = 1 << 63  # what OTLP can hold


def _int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_INT64 <= value < _INT64 else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_PARAMETERS: dict[str, tuple[str, Callable[[object], int | float | None]]] = {
    "max_tokens": (attributes.REQUEST_MAX_TOKENS, _int),
    "max_output_tokens": (attributes.REQUEST_MAX_TOKENS, _int),
    "max_completion_tokens": (attributes.REQUEST_MAX_TOKENS, _int),  # its successor, which counts
    "temperature": (attributes.REQUEST_TEMPERATURE, _float),
    "top_p": (attributes.REQUEST_TOP_P, _float),
    "top_k": (attributes.REQUEST_TOP_K, _int),
    "seed": (attributes.REQUEST_SEED, _int),
    "frequency_penalty": (attributes.REQUEST_FREQUENCY_PENALTY, _float),
    "presence_penalty": (attributes.REQUEST_PRESENCE_PENALTY, _float),
}


def parameters_of(body: Mapping[str, Any]) -> dict[str, int | float]:
    """Return attributes of the parameters that `body` sets; others than numbers are left out."""
    found: dict[str, int | float] = {}
    for name, (attribute, read) in _PARAMETERS.items():
        if name in body and (value := read(body[name])) is not None:
            found[attribute] = value
    num_choices = _int(body.get("n"))
    if num_choices is not None and num_choices != 1:
        found[attributes.REQUEST_CHOICE_COUNT] = num_choices
    stop = body.get("stop") or body.get("stop_sequences")
    if isinstance(stop, (str, list)):
        found[attributes.NUM_STOP_SEQUENCES] = 1 if isinstance(stop, str) else len(stop)
    return found
