from pathlib import Path

import pytest

from triptych_common.redis_client.address import RedisAddress
from triptych_common.redis_client.server_watch import ServerWatch


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:secret@host", "must start with redis://"),
        ("redis://user:secret@host:notaport", "cannot be used"),
        ("redis://user:secret@[::1", "is not a URL"),
        ("redis://user:secret@host?socket_timeout=1", "unknown option: socket_timeout"),
        ("redis://user:secret@host?ssl_ca_certs=/etc/hosts", "ssl_ca_certs, which is for rediss:// only"),
        ("rediss://user:secret@host?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs: there is no file /nowhere"),
        ("rediss://user:secret@host?ssl_check_hostname=perhaps&db=x", "Invalid value"),
        ("unix://user:secret@", "needs the path of a socket"),
        ("redis+sentinel://user:secret@host:26379", "needs hosts and a service"),
        ("redis+cluster://user:secret@host/3", "names a database"),
        ("redis+cluster://user:secret@host:x", "is not a cluster's host and port"),
        ("redis+sentinel://user:secret@host:x/mymaster", "is not a sentinel's host and port"),
    ],
)
def test_what_cannot_be_used_is_reported_without_the_secret(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        RedisAddress.parse(url)
    assert "secret" not in str(caught.value)


def test_sentinels() -> None:
    address = RedisAddress.parse(
        "redis+sentinel://user:p%40ss@one,two:5,[::1]:6/mymaster/2?sentinel_password=other"
    )
    assert address.sentinels == (("one", 26379), ("two", 5), ("::1", 6))
    assert address.service == "mymaster"
    assert (address.options["username"], address.options["password"]) == ("user", "p@ss")
    assert (address.options["db"], address.options["sentinel_password"]) == (2, "other")


def test_a_cluster() -> None:
    address = RedisAddress.parse("rediss+cluster://user:p%40ss@one,[::1]:6?ssl_check_hostname=false")
    assert address.nodes == (("one", 6379), ("::1", 6))
    assert (address.options["username"], address.options["password"]) == ("user", "p@ss")
    assert "host" not in address.options


def test_the_text_of_an_address_holds_no_secret() -> None:
    assert "secret" not in repr(RedisAddress.parse("redis://user:secret@host"))


def test_tls_options(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.touch()
    client = RedisAddress.parse(f"rediss://host?ssl_ca_certs={file}&ssl_check_hostname=false").client(
        "a name", ServerWatch()
    )
    options = client.connection_pool.connection_kwargs
    assert (options["ssl_ca_certs"], options["ssl_check_hostname"]) == (str(file), False)
    assert (options["socket_timeout"], options["client_name"]) == (None, "a_name")
