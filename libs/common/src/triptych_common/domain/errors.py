"""All errors of Triptych in one hierarchy.

    TriptychError
     ├─ ProtocolError                  a peer sent what is not a message
     │   ├─ UnsupportedVersionError
     │   ├─ MixedVersionsError          at the start, beside running instances of another version
     │   └─ MalformedMessageError
     ├─ IllegalTransitionError         a state machine was asked for a step that its table forbids
     ├─ BusUnavailableError            Redis cannot be reached, or refuses to work; retryable
     │   ├─ BusRefusedError            wrong login, rights or certificate: a setting must be changed
     │   └─ StreamFullError            its reader has stopped taking entries
     ├─ StoreError                     the cache_store, `code` as in `StoreFailure`
     │   ├─ StoreUnavailableError      no session, or no answer in time
     │   ├─ StoreFullError             no space now; retryable
     │   ├─ ItemTooLargeError          never fits
     │   ├─ UnknownHandleError         reservation, pin or writer that the store does not (any longer) know
     │   ├─ NotOwnerError              another session's reservation or pin
     │   ├─ SpecMismatchError          shape, dtype and bytes disagree
     │   └─ StoreProtocolError         version, order or form of frames
     └─ RequestError                   what the gateway's caller sees

The protocol's errors are defined next to the codec, below this layer.
"""

from typing import Any

from triptych_common.protocol.errors import MalformedMessageError as MalformedMessageError
from triptych_common.protocol.errors import MixedVersionsError as MixedVersionsError
from triptych_common.protocol.errors import ProtocolError as ProtocolError
from triptych_common.protocol.errors import TriptychError as TriptychError
from triptych_common.protocol.errors import UnsupportedVersionError as UnsupportedVersionError
from triptych_common.protocol.store import StoreFailure


class IllegalTransitionError(TriptychError):
    """A state machine was asked for the forbidden step of `subject` from `origin` to `target`."""

    def __init__(self, subject: str, origin: object, target: object) -> None:
        super().__init__(f"{subject}: {origin} -> {target} is not allowed")
        self.subject = subject
        self.origin = origin
        self.target = target


class BusUnavailableError(TriptychError):
    """Redis cannot be reached, or refuses to work (out of memory, wrong password, read only)."""


class BusRefusedError(BusUnavailableError):
    """Redis refuses the login, lacks rights for this user, or has an untrusted certificate.

    At the start, the service ends. Later it goes on trying: the password may be about to change.
    """


class StreamFullError(BusUnavailableError):
    """A stream holds as many entries as it may: its reader has stopped."""


class StoreError(TriptychError):
    """The store refused a command. `code` is stable, `detail` for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class StoreUnavailableError(StoreError):
    """The session is gone, or the store did not answer in time."""

    def __init__(self, detail: str, *, code: str = "unavailable") -> None:
        super().__init__(code, detail)


class StoreFullError(StoreError):
    """The store has no space now; a retry may succeed."""


class ItemTooLargeError(StoreError):
    """The item has more bytes than the region can ever hold for one item."""


class UnknownHandleError(StoreError):
    """The store does not know the reservation, pin or writer, or no longer."""


class NotOwnerError(StoreError):
    """The reservation or pin belongs to another session."""


class SpecMismatchError(StoreError):
    """Shape, dtype and number of bytes disagree, or differ from the entry's."""


class StoreProtocolError(StoreError):
    """A frame has the wrong version, order or form."""


_BY_CODE: dict[str, type[StoreError]] = {
    "bad_frame": StoreProtocolError,
    "bad_version": StoreProtocolError,
    "not_hello": StoreProtocolError,
    "full": StoreFullError,
    "too_large": ItemTooLargeError,
    "unknown_reservation": UnknownHandleError,
    "unknown_pin": UnknownHandleError,
    "unknown_writer": UnknownHandleError,
    "not_owner": NotOwnerError,
    "spec_mismatch": SpecMismatchError,
    "internal": StoreError,
}


def store_error(failure: StoreFailure) -> StoreError:
    return _BY_CODE[failure.code](failure.code, failure.detail)


class RequestError(TriptychError):
    """Error that becomes the HTTP answer to the gateway's caller, in OpenAI's format.

    `message` is shown to the caller: it names the faulty item, and holds no path, address or secret.
    """

    def __init__(
        self,
        status_code: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON body in OpenAI's error format."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
