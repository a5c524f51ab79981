"""ResponseCache: fetched media in memory, for as long as their servers allow it.

An answer is used for the callers of one tenant, so `private` forbids to keep it, as `no-store` does. Without
a lifetime it is asked for again each time, by its validators.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from cachetools import LRUCache

MAX_FRESH_S = 86_400.0
MAX_VALIDATOR_CHARS = 256
_DIRECTIVE = re.compile(r'([a-z-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,;"]*)))?')
_ENTITY_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')


@dataclass(frozen=True, slots=True)
class Freshness:
    may_keep: bool
    fresh_s: float = 0.0  # seconds for which it may be used without a request
    etag: str | None = None
    last_modified: str | None = None

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a request that asks whether the answer is still valid; empty without validators."""
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.last_modified}
        return {name: value for name, value in headers.items() if value is not None}

    @property
    def is_worth_keeping(self) -> bool:
        return self.may_keep and bool(self.fresh_s > 0 or self.validators)


def freshness_of(headers: Mapping[str, str], now: float) -> Freshness:
    """Return the freshness of an answer with lower-case `headers` that arrived at `now`, in Unix seconds."""
    control = headers.get("cache-control", "").lower()
    directives = {name: quoted or plain for name, quoted, plain in _DIRECTIVE.findall(control)}
    if directives.keys() & {"no-store", "private"} or "*" in headers.get("vary", ""):
        return Freshness(may_keep=False)
    return Freshness(
        may_keep=True,
        fresh_s=0.0 if "no-cache" in directives else _fresh_s(directives, headers, now),
        etag=_validator(headers.get("etag"), _ENTITY_TAG),
        last_modified=_date_text(headers.get("last-modified")),
    )


def retry_after_s(text: str | None, now: float) -> float | None:
    """Return the seconds of a `Retry-After` header, a number or a date; None if it cannot be read."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return _seconds(text.strip())
    date = _date(text)
    return None if date is None else max(date - now, 0.0)


def _fresh_s(directives: Mapping[str, str], headers: Mapping[str, str], now: float) -> float:
    lifetime_s = _seconds(directives.get("s-maxage", directives.get("max-age")))
    if lifetime_s is None:
        expires = _date(headers.get("expires"))
        if expires is None:
            return 0.0
        lifetime_s = expires - (_date(headers.get("date")) or now)
    age_s = _seconds(headers.get("age", "").strip()) or 0.0
    return min(max(lifetime_s - age_s, 0.0), MAX_FRESH_S)


def _seconds(text: str | None) -> float | None:
    if not text or not text.isascii() or not text.isdigit():
        return None
    return float(text[:12])  # a thousand years, and no number that is costly to read


def _date(text: str | None) -> float | None:
    if text is None or len(text) > MAX_VALIDATOR_CHARS:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _date_text(text: str | None) -> str | None:
    return text if _date(text) is not None else None


def _validator(text: str | None, pattern: re.Pattern[str]) -> str | None:
    if text is None or len(text) > MAX_VALIDATOR_CHARS or not pattern.fullmatch(text):
        return None
    return text


ENTRY_BYTES = 512  # about what an entry costs besides its content


@dataclass(frozen=True, slots=True)
class CachedResponse:
    content: bytes = field(repr=False)
    freshness: Freshness
    fresh_until: float  # the clock of the caller's choice
    num_bytes: int  # with its URL and `ENTRY_BYTES`


@dataclass(frozen=True, slots=True)
class CacheKey:
    tenant_salt: str
    url: str = field(repr=False)


class ResponseCache:
    """Cache that drops the least recently used answer. With `max_bytes` 0 nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: LRUCache[CacheKey, CachedResponse] = LRUCache(
            max_bytes, getsizeof=lambda each: each.num_bytes
        )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return int(self._entries.currsize)

    def find(self, key: CacheKey) -> CachedResponse | None:
        """Return the answer kept for `key`, fresh or not."""
        return self._entries.get(key)

    def keep(self, key: CacheKey, content: bytes, freshness: Freshness, now: float) -> None:
        """Replace the answer of `key` if the new one may be kept; else drop the old one."""
        self.drop(key)
        num_bytes = len(content) + len(key.url) + ENTRY_BYTES
        if freshness.is_worth_keeping and num_bytes <= self._entries.maxsize:
            self._entries[key] = CachedResponse(content, freshness, now + freshness.fresh_s, num_bytes)

    def drop(self, key: CacheKey) -> None:
        self._entries.pop(key, None)
