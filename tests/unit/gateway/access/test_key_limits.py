"""Limits of a key: as they are read, what a request costs of them, what answers tell."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.samples import entry
from triptych_common.coordination import RateCharge
from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import ApiKeysFileError, read_api_keys_file
from triptych_gateway.access.key_limits import (
    KeyLimits,
    RequestDemand,
    format_duration,
    limit_reached,
    rate_headers,
)
from triptych_gateway.errors import error_response


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def limits_in(path: Path, text: str) -> dict[str, KeyLimits | None]:
    return {key.name: key.limits for key in read_api_keys_file(written(path, text))}


def test_a_key_has_its_own_limits_and_those_of_the_defaults(tmp_path: Path) -> None:
    text = (
        '[defaults]\nrequests_per_minute = 600\nmodels = ["small"]\n'
        + entry("alice", "one")
        + 'models = ["small", "large"]\ntokens_per_minute = 9\nmax_concurrent_requests = 2\n'
        + entry("bob", "two")
    )
    assert limits_in(tmp_path / "keys", text) == {
        "alice": KeyLimits(
            models=("small", "large"), requests_per_minute=600, tokens_per_minute=9, max_concurrent_requests=2
        ),
        "bob": KeyLimits(models=("small",), requests_per_minute=600),
    }


def test_a_priority_is_the_best_that_a_request_may_have(tmp_path: Path) -> None:
    text = "[defaults]\npriority = 0\n" + entry("alice", "one", priority=10) + entry("bob", "two")
    limits = limits_in(tmp_path / "keys", text)
    assert limits == {"alice": KeyLimits(priority=10), "bob": KeyLimits(priority=0)}
    alice = limits["alice"]
    assert alice is not None
    assert not alice.is_counted
    for asked, given in (({}, 10), ({"priority": -5}, 10), ({"priority": 11}, 11), ({"priority": "12"}, 12)):
        assert alice.with_priority({"model": "m", **asked}) == {"model": "m", "priority": given}
    assert KeyLimits().with_priority({"priority": "any"}) == {"priority": "any"}


@pytest.mark.parametrize("asked", [None, "high", 1.5, [], 1 << 63, -(1 << 63) - 1])
def test_what_is_no_priority_is_refused(asked: Any) -> None:
    with pytest.raises(RequestError) as caught:
        KeyLimits(priority=0).with_priority({"priority": asked})
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (
        400,
        "invalid_value",
        "priority",
    )


@pytest.mark.parametrize(
    "line",
    [
        "requests_per_minute = 0",
        "requests_per_minute = -1",
        "requests_per_minute = true",
        'requests_per_minute = "10"',
        "tokens_per_minute = 1.5",
        "max_concurrent_requests = 1001",
        "media_bytes_per_minute = 10_000_000_000_000",
        "models = []",
        'models = [""]',
        'models = "small"',
        "requests_per_hour = 1",
    ],
)
def test_limits_that_are_none_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ApiKeysFileError, match=line.split()[0]):
        limits_in(tmp_path / "keys", entry("alice", "one") + line + "\n")
    with pytest.raises(ApiKeysFileError, match="defaults"):
        limits_in(tmp_path / "keys", f"[defaults]\n{line}\n" + entry("alice", "one"))


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({}, 25),
        ({"max_tokens": 10}, 35),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 45),
        ({"max_tokens": 20, "max_completion_tokens": 1}, 45),  # whichever of them this endpoint reads
        ({"max_tokens": 10, "prompt": ["a", "b", "c"]}, 55),
        ({"max_tokens": 10, "prompt": [[1, 2], [3]]}, 45),
        ({"max_tokens": 10, "prompt": [1, 2, 3]}, 35),
        ({"max_tokens": 10, "messages": [[{"role": "user"}], [{"role": "user"}]]}, 45),
        ({"max_tokens": 10, "messages": [{"role": "user"}, {"role": "user"}]}, 35),
        ({"max_output_tokens": 10, "n": 1}, 35),
        ({"max_tokens": 10, "n": 3}, 55),
        ({"max_tokens": True, "n": "2"}, 25),  # vLLM refuses it
        ({"max_tokens": -1, "n": 0}, 25),
    ],
)
def test_the_estimate_of_tokens(body: dict[str, Any], num_tokens: int) -> None:
    assert RequestDemand("m", body, 100, 0).num_tokens == num_tokens


def test_no_request_is_charged_more_than_a_minute_has() -> None:
    """It would never pass; the rest is charged at its end."""
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100, media_bytes_per_minute=1000)
    assert RequestDemand("m", {"max_tokens": 10**12}, 4, 5000).charges(limits) == (
        RateCharge("requests", 5, 1),
        RateCharge("tokens", 100, 100),
        RateCharge("media_bytes", 1000, 1000),
    )
    assert RequestDemand("m", {}, 4, 5).charges(KeyLimits(tokens_per_minute=100)) == (
        RateCharge("tokens", 100, 1),
    )


def test_headers_are_those_of_the_limits_that_there_are() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=150_000, media_bytes_per_minute=1)
    levels = {"requests": 1.0, "tokens": 16.0, "media_bytes": 1.0}
    assert rate_headers(limits, levels) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "7ms",
    }
    debt = rate_headers(KeyLimits(tokens_per_minute=10), {"tokens": 70.5})
    assert debt["x-ratelimit-remaining-tokens"] == "0"
    assert debt["x-ratelimit-reset-tokens"] == "7m3s"
    assert rate_headers(KeyLimits(max_concurrent_requests=1), {}) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9999, "1s"),
        (7.66, "7.66s"),
        (6.0, "6s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3723.5, "1h2m3.5s"),
        (90000, "25h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_limit_that_is_reached_says_which_and_when_to_come_back() -> None:
    error = limit_reached(KeyLimits(requests_per_minute=10), "requests", 5.2)
    assert error.body()["error"] == {
        "message": "this API key may use 10 requests per minute; try again in 5.2s",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert error_response(error).headers["Retry-After"] == "6"
    full = limit_reached(KeyLimits(max_concurrent_requests=2), "concurrent_requests", 0)
    assert "2 requests in flight" in full.message
    assert error_response(full).headers["Retry-After"] == "1"
