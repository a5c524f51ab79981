"""EncodeOverride: a header by which a request may choose the process that encodes it. Pure."""

from typing import Literal, get_args

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.callers import Caller
from triptych_gateway.decision.decision_policy import DecisionMode

ENCODE_HEADER = "X-Triptych-Encode"
OverrideSetting = Literal["none", "operators", "all"]


class EncodeOverride:
    """Operator's setting of the override."""

    def __init__(self, allowed: OverrideSetting) -> None:
        """Store the setting; `operators` allows API keys with `operator = true`."""
        self._allowed = allowed

    @property
    def is_possible(self) -> bool:
        """True if some request may override, and so choose `auto` whatever the setting is."""
        return self._allowed != "none"

    def read(self, value: str | None, caller: Caller) -> DecisionMode | None:
        """Return the choice in the header, or None without one.

        Raises:
            RequestError: 400 the choice is unknown; 403 the caller may not choose.
        """
        if value is None:
            return None
        if self._allowed == "none" or (self._allowed == "operators" and not caller.is_operator):
            message = f"this API key may not set {ENCODE_HEADER}"
            raise RequestError(403, "encode_override_not_allowed", message, ENCODE_HEADER)
        for mode in get_args(DecisionMode):
            if value.strip() == mode:
                return mode  # type: ignore[no-any-return]
        message = f"{ENCODE_HEADER} must be auto, remote or local"
        raise RequestError(400, "invalid_value", message, ENCODE_HEADER)


def cannot_encode_here() -> RequestError:
    """Return the error for `local` where no instance can encode."""
    message = f"{ENCODE_HEADER}: no instance of this model can encode these media"
    return RequestError(400, "encode_override_impossible", message, ENCODE_HEADER)
