"""Record beside a file's bytes, as JSON: name, kind and identity. Pure.

A record is written once and never changed.
"""

import re
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints

from triptych_common.protocol.messages import ImageProperties, Modality
from triptych_gateway.files.file_limits import KEPT_NAME_CHARS
from triptych_gateway.request.image_header import ImageHeader

MAX_RECORD_BYTES = 16 << 10
ID_PATTERN = r"file-[0-9a-f]{32}"
NS_PER_S = 1_000_000_000

Purpose = Literal["vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = ("vision", "user_data")
FileId = Annotated[str, StringConstraints(pattern=rf"^{ID_PATTERN}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

_ID = re.compile(ID_PATTERN)


def new_file_id(created_ns: int) -> str:
    """Return an id of time and random digits: it sorts files by creation and cannot be guessed."""
    return f"file-{created_ns:016x}{secrets.token_hex(8)}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of an id. No other text becomes part of a path."""
    return _ID.fullmatch(text) is not None


class FileRecord(BaseModel):
    """Record of one uploaded file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    file_id: FileId
    filename: str = Field(max_length=KEPT_NAME_CHARS)  # as the client gave it; part of no path
    purpose: Purpose
    num_bytes: PositiveInt
    created_ns: NonNegativeInt  # wall clock
    expires_at: NonNegativeInt  # wall clock, seconds
    media_digest: Digest
    modalities: tuple[Modality, ...] = Field(min_length=1)  # that it can be; the likeliest first
    image: ImageProperties | None = None

    @property
    def image_header(self) -> ImageHeader | None:
        if self.image is None:
            return None
        return ImageHeader(self.image.format, self.image.width, self.image.height)

    def as_object(self) -> dict[str, Any]:
        """Return the file in the format of OpenAI's API."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_ns // NS_PER_S,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def deleted_object(file_id: str) -> dict[str, Any]:
    """Return the answer to a deletion in the format of OpenAI's API."""
    return {"id": file_id, "object": "file", "deleted": True}
