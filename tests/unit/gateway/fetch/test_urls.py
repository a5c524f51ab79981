"""URLs in one normal form, and which of them are refused."""

import pytest

from triptych_common.protocol.messages import Modality
from triptych_gateway.fetch.failures import FetchError, MalformedUrlError, UrlRefusedError, request_error
from triptych_gateway.fetch.fetch_rules import MAX_URL_CHARS, AddressRules, HostRules, UrlRules, parse_url

RULES = UrlRules(frozenset({80, 443}), HostRules(), AddressRules())
SIGNED = "https://example.org/private/a.png?signature=secret"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://example.org", "http://example.org/"),
        ("HTTP://Example.ORG./a", "http://example.org/a"),
        ("https://example.org:443/a?b=c#part", "https://example.org/a?b=c"),
        ("https://example.org#part?x", "https://example.org/"),
        ("http://example.org?b=c", "http://example.org/?b=c"),
        ("http://example.org:443/", "http://example.org:443/"),
        ("http://example.org/a%20b/%2e%2e/c?x=[1]&y=%00", "http://example.org/a%20b/%2e%2e/c?x=[1]&y=%00"),
        ("http://example.org/ü?ß", "http://example.org/%C3%BC?%C3%9F"),
        ('http://example.org/a\\b"<>^`{|}', "http://example.org/a%5Cb%22%3C%3E%5E%60%7B%7C%7D"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
        ("http://ＥＸＡＭＰＬＥ。org/", "http://example.org/"),
        ("http://my_host-1.example.org/", "http://my_host-1.example.org/"),
        ("http://8.8.8.8/", "http://8.8.8.8/"),
        ("http://８.８.８.８/", "http://8.8.8.8/"),
        ("http://[2606:4700:0:0::1111]:80/a", "http://[2606:4700::1111]/a"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    url = RULES.check(text)
    assert url.text == normal
    assert RULES.check(normal) == url


MALFORMED = [
    *(
        "",
        "http",
        "http:",
        "http:/",
        "http://",
        "http:///a",
        "//example.org/",
        "http:example.org",
        "http://?",
        "a.png",
    ),
    *("http://exa mple.org/", "http://example.org/a b", "http://example.org/\n", "\thttp://example.org/"),
    *(
        "http://example.org/\x00",
        "http://example.org/\x85",
        "http://example.org/\xa0",
        "ht\ntp://example.org/",
    ),
    *("http://example.org/\u2028", "http://\ud800.org/", "http://example.org/\ud800"),
    *("http://-/..", "http://..", "http://a..b/", "http://.example.org/", "http://example.org../"),
    *(
        "http://%65xample.org/",
        "http://exam%70le.org/",
        "http://example.org\\.evil.com/",
        "http://exa'mple.org/",
    ),
    *("http://" + "a" * 64 + ".org/", "http://" + "a." * 130 + "org/", "http://" + "ü" * 300 + ".org/"),
    *(
        "http://example.org:/",
        "http://example.org:0/",
        "http://example.org:65536/",
        "http://example.org:99999999/",
    ),
    *(
        "http://example.org:80:80/",
        "http://example.org:8o/",
        "http://example.org:-1/",
        "http://example.org:８０/",
    ),
    *("http://[::1/", "http://::1/", "http://[::1]x/", "http://[::1]:/", "http://[]/", "http://[127.0.0.1]/"),
    *("http://[::ffff:127.0.0.1%25eth0]/", "http://[fe80::1%eth0]/", "http://[v1.x]/", "http://[::g]/"),
    *("http://127.1/", "http://127.0.1/", "http://2130706433/", "http://017700000001/", "http://0x7f000001/"),
    *(
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.01/",
        "http://127.0.0.0x1/",
        "http://1.2.3.4.5/",
    ),
    *("http://256.0.0.1/", "http://0/", "http://0x/", "http://①②⑦.1/", "http://127。0。1/"),
    "http://example.org/" + "a" * MAX_URL_CHARS,
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed(text: str) -> None:
    with pytest.raises(MalformedUrlError):
        RULES.check(text)


REFUSED = {
    "another scheme": [
        *("ftp://example.org/", "gopher://example.org/", "ws://example.org/", "wss://example.org/"),
        *("dict://example.org/", "ldap://example.org/", "unix://example.org/", "http+unix://example.org/"),
        *("jar:http://e.org/!/a", "view-source:http://example.org/"),
    ],
    "credentials": ["http://user@example.org/", "http://user:pw@example.org/", "http://@example.org/"],
    "who is the host": [
        "http://example.org@127.0.0.1/",
        "http://127.0.0.1\\@example.org/",
        "http://a:b@c@d/",
    ],
    "port": ["http://example.org:22/", "http://example.org:6379/", "https://example.org:8443/"],
    "loopback": [
        "http://127.0.0.1/",
        "http://127.0.0.1./",
        "https://[::1]/",
        "http://[::]/",
        "http://0.0.0.0/",
    ],
    "mapped": ["http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[0:0:0:0:0:ffff:127.0.0.1]/"],
    "wide digits": ["http://１２７.０.０.１/", "http://127。0。0。1/", "http://①②⑦.⓪.⓪.①/"],
    "metadata": ["http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/"],
}


@pytest.mark.parametrize("text", [each for group in REFUSED.values() for each in group])
def test_refused(text: str) -> None:
    with pytest.raises((UrlRefusedError, MalformedUrlError)):
        RULES.check(text)


@pytest.mark.parametrize("text", REFUSED["credentials"])
def test_credentials_are_named_as_the_reason(text: str) -> None:
    with pytest.raises(UrlRefusedError, check=lambda error: "credentials" in error.reason):
        RULES.check(text)


@pytest.mark.parametrize(
    ("allowed", "denied", "host", "is_allowed"),
    [
        ((), (), "example.org", True),
        (("example.org",), (), "example.org", True),
        (("Example.ORG.",), (), "example.org", True),
        (("example.org",), (), "a.example.org", False),
        (("example.org",), (), "example.org.evil.com", False),
        (("*.example.org",), (), "a.example.org", True),
        (("*.example.org",), (), "a.b.example.org", True),
        (("*.example.org",), (), "example.org", False),
        (("*.example.org",), (), "evilexample.org", False),
        ((), ("example.org",), "example.org", False),
        ((), ("*.example.org",), "a.b.example.org", False),
        ((), ("*.example.org",), "example.com", True),
        (("*.example.org",), ("bad.example.org",), "bad.example.org", False),
        (("*.example.org",), ("*.bad.example.org",), "x.bad.example.org", False),
        (("8.8.8.8",), (), "8.8.8.8", True),
        ((), ("2606:4700:0::1",), "[2606:4700::1]", False),
    ],
)
def test_host_lists(allowed: tuple[str, ...], denied: tuple[str, ...], host: str, is_allowed: bool) -> None:
    rules = UrlRules(frozenset({80}), HostRules(allowed, denied), AddressRules())
    for text in (f"http://{host}/", f"http://{host.upper()}/"):
        if is_allowed:
            rules.check(text)
        else:
            with pytest.raises(UrlRefusedError):
                rules.check(text)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("https://other.example/b", "https://other.example/b"),
        ("/b?c", "https://example.org/b?c"),
        ("b", "https://example.org/private/b"),
        ("?c", "https://example.org/private/a.png?c"),
        ("../../../b", "https://example.org/b"),
        ("//other.example/b#x", "https://other.example/b"),
        ("/\\other.example/", "https://example.org/%5Cother.example/"),
        ("/ü", "https://example.org/%C3%BC"),
    ],
)
def test_redirect(location: str, target: str) -> None:
    assert RULES.check_redirect(parse_url(SIGNED), location).text == target


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://example.org/",
            "http://other.example/",
            "ftp://example.org/",
            "file:///etc/passwd",
            "data:,x",
        ),
        *("//127.0.0.1/", "https://[::1]/", "https://user@other.example/", "https://example.org:22/"),
        *(
            "https://127.1/",
            "https://[",
            "/a b",
            "/a\r\nX: y",
            "javascript:alert(1)",
            "https://" + "a" * 9000,
        ),
    ],
)
def test_redirect_refused(location: str) -> None:
    with pytest.raises(UrlRefusedError) as caught:
        RULES.check_redirect(parse_url(SIGNED), location)
    assert "redirect" in caught.value.reason


@pytest.mark.parametrize("text", [SIGNED, SIGNED.replace("https://", "https://user:pw@"), SIGNED + "\n"])
def test_no_text_tells_what_a_url_hides(text: str) -> None:
    rules = UrlRules(frozenset({80}), HostRules(), AddressRules())
    with pytest.raises(FetchError) as caught:
        rules.check(text)
    shown = f"{caught.value!r} {request_error(caught.value, 'here', Modality.IMAGE).message}"
    assert not any(secret in shown for secret in ("signature", "secret", "private", "pw"))
    assert "private" not in repr(parse_url(SIGNED))
