"""Certificates are checked, names too, and https does not lead to http."""

from pathlib import Path

import pytest

from tests.support.gateway.certificates import DAY, NOW, Authority
from tests.support.gateway.fetching import ChosenNames, code_of, fetch, fetching, refusal
from tests.support.gateway.media_server import SERVED, MediaServer, answering, redirecting
from triptych_common.domain.errors import TriptychError

FAILED = (400, "media_fetch_failed")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def names() -> ChosenNames:
    return ChosenNames(media_test=[[SERVED]], other_test=[[SERVED]])


def secure(target: str = "/") -> MediaServer:
    return MediaServer(answers={target: answering(body=b"secure")})


async def test_trusted_where_the_operator_names_the_authority(authority: Authority) -> None:
    async with secure().running(authority.server_context("media.test")) as server:
        url = server.url(scheme="https", host="media.test")
        async with fetching(names(), fetch_ca_file=authority.ca_file) as fetcher:
            assert await fetch(fetcher, url) == b"secure"
            assert await fetch(fetcher, url.replace("media.test", "media.test.")) == b"secure"
        async with fetching(names()) as fetcher:
            error = await refusal(fetcher, url)
    assert code_of(error) == FAILED
    assert "certificate" in error.message
    assert len(server.asked) == 2


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("fault", ["another name", "an address", "expired", "another authority"])
async def test_not_trusted(
    authority: Authority, server: MediaServer, tmp_path: Path, fault: str, is_chained: bool
) -> None:
    """Neither where it is asked for nor at the end of a chain of redirects."""
    plain = server
    until = NOW - DAY if fault == "expired" else NOW + DAY
    host = {"another name": "other.test", "an address": SERVED}.get(fault, "media.test")
    (tmp_path / "other").mkdir()
    signer = Authority(tmp_path / "other") if fault == "another authority" else authority
    async with (
        secure().running(signer.server_context("media.test", until)) as tls,
        fetching(names(), fetch_ca_file=authority.ca_file) as fetcher,
    ):
        url = tls.url(scheme="https", host=host)
        error = await refusal(fetcher, plain.leading_to(url) if is_chained else url)
    assert code_of(error) == FAILED
    assert "certificate" in error.message
    assert tls.asked == []
    assert [asked.target for asked in plain.asked] == ["/first", "/second"] * is_chained


async def test_https_does_not_lead_to_http(authority: Authority, server: MediaServer) -> None:
    plain = server
    async with secure("/there").running(authority.server_context("media.test")) as tls:
        tls.answers["/down"] = redirecting(plain.url("/a.png"))
        plain.answers["/up"] = redirecting(tls.url("/there", "https", "media.test"))
        async with fetching(names(), fetch_ca_file=authority.ca_file) as fetcher:
            assert await fetch(fetcher, plain.url("/up")) == b"secure"
            error = await refusal(fetcher, tls.url("/down", "https", "media.test"))
    assert code_of(error) == (400, "url_not_allowed")
    assert [asked.target for asked in plain.asked] == ["/up"]


async def test_no_tls_where_it_is_asked_for(server: MediaServer) -> None:
    async with fetching() as fetcher:
        url = server.url("/a.png", scheme="https")
        assert code_of(await refusal(fetcher, url)) == FAILED
        assert server.asked == []
        assert code_of(await refusal(fetcher, server.leading_to(url))) == FAILED
    assert {asked.target for asked in server.asked} == {"/first", "/second"}


async def test_a_file_of_authorities_that_cannot_be_used(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("nothing")
    for path in (broken, tmp_path / "missing.pem"):
        with pytest.raises(TriptychError, match="file of authorities"):
            async with fetching(fetch_ca_file=path):
                pass
