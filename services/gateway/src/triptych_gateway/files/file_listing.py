"""Page of a key's files. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.files.file_record import PURPOSES, FileRecord, is_file_id

MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Parameters of the caller's query."""

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
