"""One page of a key's files. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.files.file_record import PURPOSES, FileRecord

MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What the caller asks for."""

    after: str | None = None  # id of the last file of the page before
    limit: int = MAX_LIMIT
    is_ascending: bool = False  # by their creation
    purpose: str | None = None

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> "ListQuery":
        """From a query string's parameters; others are ignored.

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
        return cls(parameters.get("after"), int(limit), order == "asc", purpose)


def page_of(records: Iterable[FileRecord], query: ListQuery) -> dict[str, Any]:
    """As OpenAI's API lists files.

    Raises:
        RequestError: 400, the file to go on after is not among them.
    """
    chosen = sorted(
        (record for record in records if query.purpose in (None, record.purpose)),
        key=lambda record: (record.created_ns, record.file_id),
        reverse=not query.is_ascending,
    )
    if query.after is not None:
        ids = [record.file_id for record in chosen]
        if query.after not in ids:
            raise RequestError(400, "invalid_value", "after names no file of this list", "after")
        chosen = chosen[ids.index(query.after) + 1 :]
    page = chosen[: query.limit]
    return {
        "object": "list",
        "data": [record.as_object() for record in page],
        "first_id": page[0].file_id if page else None,
        "last_id": page[-1].file_id if page else None,
        "has_more": len(chosen) > len(page),
    }
