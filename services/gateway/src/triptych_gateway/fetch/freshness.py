"""How long an answer may be used again, from its headers (RFC 9111, the part that images need). Pure.

An answer is used for the callers of one tenant, so `private` forbids to keep it, as `no-store` does. Without
a lifetime it is asked for again each time, by its validators.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

MAX_FRESH_S = 86_400.0
MAX_VALIDATOR_CHARS = 256
_DIRECTIVE = re.compile(r'([a-z-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,;"]*)))?')
_ENTITY_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')


@dataclass(frozen=True, slots=True)
class Freshness:
    """Of one answer, at the time when it came."""

    may_keep: bool
    fresh_s: float = 0.0  # so long it may be used without asking
    etag: str | None = None
    last_modified: str | None = None

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a request that asks whether the answer still holds; none: it cannot be asked."""
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.last_modified}
        return {name: value for name, value in headers.items() if value is not None}

    @property
    def is_worth_keeping(self) -> bool:
        return self.may_keep and bool(self.fresh_s > 0 or self.validators)


def freshness_of(headers: Mapping[str, str], now: float) -> Freshness:
    """Of an answer with `headers`, names in lower case, that came at `now`, seconds since the epoch."""
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
    """Of a `Retry-After` header: seconds, or a date. None: there is none that can be read."""
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
