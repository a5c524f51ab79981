"""Base URLs: IPv6 in brackets, and nothing that an HTTP client cannot call."""

import httpx
import pytest
from pydantic import ValidationError

from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.urls import base_url, check_base_url, check_host, local_urls


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("2001:db8::7", "http://[2001:db8::7]:80"),
        ("prefill_decode-0.backend", "http://prefill_decode-0.backend:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_a_base_url_is_one_that_a_client_can_call(host: str, url: str) -> None:
    assert base_url(host, 80) == url
    assert check_base_url(url) == url
    assert httpx.URL(url).host == host.strip("[]")


@pytest.mark.parametrize("host", ["", "::", "0.0.0.0"])
def test_all_addresses_cannot_be_called(host: str) -> None:
    assert check_host(host) == host
    with pytest.raises(ValueError, match="all addresses"):
        base_url(host, 80)


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("127.0.0.1", ("http://127.0.0.1:80",)),
        ("0.0.0.0", ("http://127.0.0.1:80",)),
        ("::1", ("http://[::1]:80",)),
        ("::", ("http://[::1]:80", "http://127.0.0.1:80")),
        ("", ("http://[::1]:80", "http://127.0.0.1:80")),
    ],
)
def test_where_this_machine_reaches_a_server(host: str, urls: tuple[str, ...]) -> None:
    assert local_urls(host, 80) == urls


HOSTS = [
    "a b",
    "a..b",
    "-a",
    "a" * 64,
    "fe80::1%eth0",
    ":::",
    "[::1",
    "a/b",
    "a:80",
    "xn--",
    "ä.example",
    "a\n",
]


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError):
        base_url(host, 80)


URLS = [
    "http://::1:8100",
    "http://[::1:8100",
    "http://::1",
    "http://[fe80::1%25eth0]:1",
    "http://h:99999",
    "http://h:abc",
    "http://h:",
    "http://h:-1",
    "http:///path",
    "ftp://h:1",
    "h:1",
    "",
    "http://user:password@h:1",
    "http://h:1/?query",
    "http://h:1/#part",
    "http://h:1/\n",
    "http://\x00",
    "http://a b",
    "http://a..b:1",
    "http://xn--/",
    "http://" + "a." * 1100,
]


@pytest.mark.parametrize("url", URLS)
def test_a_record_with_no_proper_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        InstanceRecord(instance="pd-0", boot_id="b", role=Role.PREFILL_DECODE, url=url)


@pytest.mark.parametrize(
    "url", ["https://gateway.example", "http://[::1]:1/base/", "http://10.0.0.1:8000/a-b_c"]
)
def test_a_path_and_a_missing_port_are_allowed(url: str) -> None:
    assert check_base_url(url) == url
