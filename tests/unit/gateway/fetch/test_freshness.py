"""How long an answer may be used again, and what is kept of it."""

import pytest

from triptych_gateway.fetch.failures import ServerFailedError
from triptych_gateway.fetch.response_cache import (
    ENTRY_BYTES,
    MAX_FRESH_S,
    CacheKey,
    Freshness,
    ResponseCache,
    freshness_of,
    retry_after_s,
)
from triptych_gateway.fetch.shared_downloads import MAX_RETRY_AFTER_S, retry_wait_s

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
NOW = 784_111_777.0  # the same


@pytest.mark.parametrize(
    ("headers", "fresh_s"),
    [
        ({}, 0),
        ({"cache-control": "max-age=60"}, 60),
        ({"cache-control": "public, MAX-AGE=60, immutable"}, 60),
        ({"cache-control": 'max-age="60"'}, 60),
        ({"cache-control": "max-age=60", "age": "45"}, 15),
        ({"cache-control": "max-age=60", "age": "61"}, 0),
        ({"cache-control": "max-age=60, s-maxage=5"}, 5),
        ({"cache-control": "max-age=60, no-cache"}, 0),
        ({"cache-control": "max-age=-1"}, 0),
        ({"cache-control": "max-age=soon"}, 0),
        ({"cache-control": "max-age=" + "9" * 5000}, MAX_FRESH_S),
        ({"cache-control": "max-age=60", "expires": DATE, "date": DATE}, 60),
        ({"expires": "Sun, 06 Nov 1994 08:50:37 GMT", "date": DATE}, 60),
        ({"expires": "Sun, 06 Nov 1994 08:50:37 GMT"}, 60),
        ({"expires": DATE, "date": "Sun, 06 Nov 1994 08:50:37 GMT"}, 0),
        ({"expires": "0"}, 0),
        ({"expires": "x" * 10_000}, 0),
    ],
)
def test_lifetime(headers: dict[str, str], fresh_s: float) -> None:
    assert freshness_of(headers, NOW).fresh_s == fresh_s


@pytest.mark.parametrize(
    "headers",
    [
        {"cache-control": "no-store", "etag": '"a"'},
        {"cache-control": "max-age=60, no-store"},
        {"cache-control": "private, max-age=60"},
        {"cache-control": 'private="set-cookie", max-age=60'},
        {"cache-control": "max-age=60", "vary": "*"},
        {},
        {"cache-control": "no-cache"},
        {"etag": "a"},
        {"etag": '"a\r\nX: y"'},
        {"etag": '"' + "a" * 300 + '"'},
        {"last-modified": "yesterday"},
    ],
)
def test_not_worth_keeping(headers: dict[str, str]) -> None:
    assert not freshness_of(headers, NOW).is_worth_keeping


def test_validators() -> None:
    both = freshness_of({"etag": 'W/"a"', "last-modified": DATE, "cache-control": "no-cache"}, NOW)
    assert both.is_worth_keeping
    assert both.validators == {"If-None-Match": 'W/"a"', "If-Modified-Since": DATE}


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        (None, None),
        ("7", 7),
        (" 7 ", 7),
        ("soon", None),
        ("-1", None),
        ("٣", None),
        (DATE, 0),
        ("1" * 5000, 1e11),
    ],
)
def test_retry_after(text: str | None, wait_s: float | None) -> None:
    found = retry_after_s(text, NOW)
    assert found == wait_s if wait_s is None or wait_s < 100 else found is not None and found >= wait_s


def test_attempts_end_and_their_waits_grow() -> None:
    error = ServerFailedError("x")
    shortest = [retry_wait_s(4, attempt, error, 0.0) for attempt in range(1, 5)]
    longest = [retry_wait_s(4, attempt, error, 1.0) for attempt in range(1, 5)]
    assert shortest == [0.1, 0.2, 0.4, None]
    assert longest == [0.2, 0.4, 0.8, None]
    assert retry_wait_s(1, 1, error, 0.5) is None


def test_a_server_may_ask_for_time_within_a_bound() -> None:
    assert retry_wait_s(3, 1, ServerFailedError("x", 2.0), 0.5) == 2.0
    assert retry_wait_s(3, 1, ServerFailedError("x", 0.0), 1.0) == 0.2
    assert retry_wait_s(3, 1, ServerFailedError("x", MAX_RETRY_AFTER_S + 1), 0.5) is None


FRESH = Freshness(may_keep=True, fresh_s=10)


def key(url: str, salt: str = "") -> CacheKey:
    return CacheKey(salt, url)


def test_the_cache_is_bounded_and_the_oldest_goes_first() -> None:
    cache = ResponseCache(3 * (ENTRY_BYTES + 101))
    for name in "abc":
        cache.keep(key(name), bytes(100), FRESH, 5.0)
    assert cache.find(key("a")) is not None
    cache.keep(key("d"), bytes(100), FRESH, 5.0)
    assert [name for name in "abcd" if cache.find(key(name))] == ["a", "c", "d"]
    cache.keep(key("e"), bytes(10_000), FRESH, 5.0)  # more than all of it
    assert [name for name in "acde" if cache.find(key(name))] == ["a", "c", "d"]
    assert cache.num_bytes == 3 * (ENTRY_BYTES + 101)
    for name in "acd":
        cache.drop(key(name))
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_what_may_not_be_kept_replaces_what_was() -> None:
    cache = ResponseCache(10_000)
    cache.keep(key("a"), b"x", FRESH, 5.0)
    cache.keep(key("a"), b"y", Freshness(may_keep=False), 6.0)
    assert cache.find(key("a")) is None
    off = ResponseCache(0)
    off.keep(key("a"), b"", FRESH, 5.0)
    assert len(off) == 0
