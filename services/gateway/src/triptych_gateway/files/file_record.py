"""Record of an uploaded file, as an object of the Files API, and a page of a list of them.

A record is written once and never changed.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import ImageProperties, Modality
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.named_items import Digest

KEPT_NAME_CHARS = 255  # of the name that the client gives
MAX_RECORD_BYTES = 16 << 10
ID_PATTERN = r"file-[0-9a-f]{32}"
NS_PER_S = 1_000_000_000

Purpose = Literal["vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = ("vision", "user_data")
FileId = Annotated[str, StringConstraints(pattern=rf"^{ID_PATTERN}$")]

_ID = re.compile(ID_PATTERN)


def new_file_id(created_ns: int) -> str:
    """Return an id of time and random digits: it sorts files by creation and cannot be guessed."""
    return f"file-{created_ns:016x}{secrets.token_hex(8)}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of an id. No other text becomes part of a path."""
    return _ID.fullmatch(text) is not None


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a later release may have written it

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
        return None if self.image is None else ImageHeader.of(self.image)

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


MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class ListQuery:
    after: str | None = None  # id of the last file of the page before; it may be gone
    limit: int = MAX_LIMIT
    is_ascending: bool = False  # by their creation
    purpose: str | None = None

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> "ListQuery":
        """Parse the known parameters of a query string; others are ignored.

        Raises:
            RequestError: 400 naming the parameter.
        """
        limit, order = parameters.get("limit", str(MAX_LIMIT)), parameters.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MAX_LIMIT):
            raise RequestError(400, "invalid_value", f"limit must be from 1 to {MAX_LIMIT}", "limit")
        if order not in ("asc", "desc"):
            raise RequestError(400, "invalid_value", "order must be asc or desc", "order")
        purpose = parameters.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise RequestError(
                400, "invalid_value", f"purpose must be one of {', '.join(PURPOSES)}", "purpose"
            )
        after = parameters.get("after")
        if after is not None and not is_file_id(after):
            raise RequestError(400, "invalid_value", "after must be the id of a file", "after")
        return cls(after, int(limit), order == "asc", purpose)


def page_of(records: Iterable[FileRecord], query: ListQuery) -> dict[str, Any]:
    """Return a page in OpenAI's format. Ids sort by creation, so each is a place in the list."""
    chosen = sorted(
        (record for record in records if query.purpose in (None, record.purpose)),
        key=lambda record: record.file_id,
        reverse=not query.is_ascending,
    )
    after = query.after
    if after is not None:
        chosen = [
            each for each in chosen if (each.file_id > after if query.is_ascending else each.file_id < after)
        ]
    page = chosen[: query.limit]
    return {
        "object": "list",
        "data": [record.as_object() for record in page],
        "first_id": page[0].file_id if page else None,
        "last_id": page[-1].file_id if page else None,
        "has_more": len(chosen) > len(page),
    }
