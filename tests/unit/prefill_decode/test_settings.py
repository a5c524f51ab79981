"""Where prefill_decode listens, and what it is called."""

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from triptych_common.protocol.urls import base_url
from triptych_prefill_decode.settings import PrefillDecodeSettings


def advertised_url(tmp_path: Path, **hosts: str) -> str:
    settings = PrefillDecodeSettings(model="m", run_dir=tmp_path, **hosts)
    return base_url(settings.advertised_host or settings.host, 8100)


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ({}, "http://127.0.0.1:8100"),
        ({"host": "::1"}, "http://[::1]:8100"),
        ({"host": "[::1]"}, "http://[::1]:8100"),
        ({"host": "::"}, f"http://{socket.gethostname()}:8100"),
        ({"host": "0.0.0.0"}, f"http://{socket.gethostname()}:8100"),
        ({"host": "::", "advertised_host": "2001:db8::7"}, "http://[2001:db8::7]:8100"),
        ({"host": "::1", "advertised_host": "prefill_decode-0"}, "http://prefill_decode-0:8100"),
    ],
)
def test_the_url_in_the_registry(tmp_path: Path, hosts: dict[str, str], url: str) -> None:
    assert advertised_url(tmp_path, **hosts) == url


@pytest.mark.parametrize("host", ["fe80::1%eth0", "a b", "http://h", "h:1"])
def test_a_host_that_no_gateway_could_call_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValidationError, match="advertised_host"):
        advertised_url(tmp_path, host="::", advertised_host=host)


@pytest.mark.parametrize("name", ["request_processor_options", "request_image_options"])
def test_options_of_requests_are_no_matter_of_a_vision_tower_here(tmp_path: Path, name: str) -> None:
    """Only encoders check what a processor made of them before their tower is given it."""
    options = {name: {"max_pixels": {"min": 4, "max": 4096}}}
    PrefillDecodeSettings(model="m", run_dir=tmp_path, **options)
    with pytest.raises(ValidationError, match="TRIPTYCH_" + name.upper()):
        PrefillDecodeSettings(model="m", run_dir=tmp_path, local_encode="fallback", **options)


@pytest.mark.parametrize(
    ("options", "role", "has_tower"),
    [
        ({}, "prefill-decode", False),
        ({"local_encode": "fallback"}, "encode-prefill-decode", True),
        ({"role": "encode-prefill-decode"}, "encode-prefill-decode", True),
        ({"role": "prefill"}, "prefill", False),
        ({"role": "prefill", "local_encode": "fallback"}, "encode-prefill", True),
        ({"role": "encode-prefill"}, "encode-prefill", True),
        ({"role": "decode"}, "decode", False),
    ],
)
def test_the_role_and_the_tower(options: dict[str, str], role: str, has_tower: bool, tmp_path: Path) -> None:
    settings = PrefillDecodeSettings(model="m", run_dir=tmp_path, **options)
    assert settings.announced_role == role
    assert settings.has_tower is has_tower


@pytest.mark.parametrize("options", [{"role": "encode"}, {"role": "decode", "local_encode": "fallback"}])
def test_roles_that_are_none_are_refused(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        PrefillDecodeSettings(model="m", run_dir=tmp_path, **options)
