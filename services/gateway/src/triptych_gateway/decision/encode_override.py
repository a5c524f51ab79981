"""EncodeOverride: whether a request may say whose encode it gets, by a header. Pure."""

from typing import Literal, get_args

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.callers import Caller
from triptych_gateway.decision.decision_policy import DecisionMode

ENCODE_HEADER = "X-Triptych-Encode"
OverrideSetting = Literal["none", "operators", "all"]


class EncodeOverride:
    """The operator's setting."""

    def __init__(self, allowed: OverrideSetting) -> None:
        """`allowed`: whose requests may; `operators`: those of API keys with `operator = true`."""
        self._allowed = allowed

    @property
    def is_possible(self) -> bool:
        """Some request may: one may ask for `auto`, whatever the setting is."""
        return self._allowed != "none"

    def read(self, value: str | None, caller: Caller) -> DecisionMode | None:
        """What the header asks for; None: it is not there.

        Raises:
            RequestError: 400 it asks for nothing that there is; 403 the caller may not.
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
    """`local` is asked for, and no instance can."""
    message = f"{ENCODE_HEADER}: no instance of this model encodes these media itself"
    return RequestError(400, "encode_override_impossible", message, ENCODE_HEADER)
