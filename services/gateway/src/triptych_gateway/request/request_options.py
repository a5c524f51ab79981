"""Gate for a request's options of the model's processor and the media reader.

vLLM has the same one, in front of its renderer: an option changes an image's cost and the vision tower's
input. Here, as there, all are refused unless the operator lists them; then with bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.domain.media_options import MAX_NAME_CHARS, OptionRules, refused_option
from triptych_common.protocol.messages import Modality

PROCESSOR_FIELD = "mm_processor_kwargs"
MEDIA_IO_FIELD = "media_io_kwargs"
OPTIONS_FIELDS = (PROCESSOR_FIELD, MEDIA_IO_FIELD)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that requests may set; none by default."""

    processor: OptionRules = field(default_factory=dict)
    media: Mapping[Modality, OptionRules] = field(default_factory=dict)

    def check_options(self, fields: Mapping[str, Any]) -> None:
        """Check both fields of a request's body, as parsed; absent, null and {} are fine.

        Raises:
            RequestError: 400, `param` names the option, or the field where none is allowed at all.
        """
        processor_options = fields.get(PROCESSOR_FIELD)
        if processor_options is not None:
            _check(processor_options, self.processor, PROCESSOR_FIELD, PROCESSOR_FIELD)
        media_io_options = _object(fields.get(MEDIA_IO_FIELD), MEDIA_IO_FIELD)
        if media_io_options and not any(self.media.values()):
            raise _not_allowed(MEDIA_IO_FIELD)
        for name, options in media_io_options.items():
            path = f"{MEDIA_IO_FIELD}.{name[:MAX_NAME_CHARS]}"
            if name not in set(Modality):
                message = f"{path}: media are of type {', '.join(Modality)}"
                raise RequestError(400, "invalid_value", message, path)
            _check(options, self.media.get(Modality(name), {}), path, path)


def _check(options: Any, rules: OptionRules, path: str, field_name: str) -> None:
    options = _object(options, path)
    if options and not rules:
        raise _not_allowed(field_name)
    refusal = refused_option(options, rules)
    if refusal is not None:
        param = f"{path}.{refusal.name}"
        raise RequestError(400, "invalid_value", f"{param} {refusal.reason}", param)


def _object(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(400, "invalid_value", f"{path} must be an object", path)
    return value


def _not_allowed(name: str) -> RequestError:
    return RequestError(400, "field_not_allowed", f"{name} may not be set by requests here", name)
