"""Errors of the wire, and the root of all Triptych errors. `domain.errors` draws the whole tree."""


class TriptychError(Exception):
    """Root of every error that Triptych raises on purpose."""


class ProtocolError(TriptychError):
    """Bytes from a peer are not a message of this protocol."""


class UnsupportedVersionError(ProtocolError):
    """The message has another schema version."""

    def __init__(self, version: str, supported: int) -> None:
        super().__init__(f"message has schema version {version}, this process speaks {supported}")
        self.version = version
        self.supported = supported


class MalformedMessageError(ProtocolError):
    """A field is missing, unknown, or of the wrong type; or a frame is too large."""
