"""Whose `traceparent` counts."""

from ipaddress import ip_network
from typing import Any

import pytest
from opentelemetry import trace

from triptych_gateway.tracing.trace_trust import TraceTrust

THEIRS = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
INSIDE = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def is_followed(trust: TraceTrust, client: Any = ("10.1.2.3", 5), *more: tuple[bytes, bytes]) -> bool:
    headers = [(b"host", b"x"), (b"traceparent", THEIRS), *more]
    context = trust.context_of({"type": "http", "headers": headers, "client": client})
    return trace.get_current_span(context).get_span_context().is_valid


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("10.1.2.3", 5), True),
        (("::ffff:10.1.2.3", 5), True),
        (("fd00::1", 5), True),
        (("11.1.2.3", 5), False),
        (("fe80::1", 5), False),
        (("unix", 0), False),
        (None, False),
    ],
)
def test_of_peers_in_networks(client: Any, expected: bool) -> None:
    assert is_followed(TraceTrust(True, INSIDE), client) is expected


def test_a_header_that_stands_twice_counts_not_at_all() -> None:
    assert not is_followed(TraceTrust(True), None, (b"traceparent", THEIRS))


def test_the_state_of_several_headers_is_one() -> None:
    headers = [(b"traceparent", THEIRS), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    context = TraceTrust(True).context_of({"type": "http", "headers": headers, "client": None})
    assert trace.get_current_span(context).get_span_context().trace_state.to_header() == "a=1,b=2"
