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


class MixedVersionsError(ProtocolError):
    """A running instance of the deployment speaks another schema version."""

    def __init__(self, instance: str, cause: UnsupportedVersionError) -> None:
        super().__init__(
            f"deployment has instances of another schema version: {instance} speaks {cause.version}, this "
            f"process speaks {cause.supported}; stop them first, or start under another deployment name"
        )


class MalformedMessageError(ProtocolError):
    """A field is missing, unknown, or of the wrong type; or a frame is too large."""
