"""How a machine becomes one of several hosts, and what it refuses."""

import socket
from pathlib import Path
from typing import Any

import pytest

from triptych_cli.options import HostOptions, SystemOptions
from triptych_cli.system.joining import JoinError, check_ports, host_name, join_target, plan_host
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import HostPlan
from triptych_cli.system.shared_secrets import KEY_FILE_NAME, URL_FILE_NAME, ensure_key, write_private

REDIS = "redis://:secret@192.0.2.1:6379/0"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TRIPTYCH_FABRIC_KEY_FILE", "TRIPTYCH_FABRIC_TLS_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run", tmp_path / "state")


def options(redis_url: str | None = None, gateways: int | None = None, **hosts: Any) -> SystemOptions:
    several = HostOptions(**hosts)
    return SystemOptions("m", None, None, redis_url, 8000, None, "", "", gateways=gateways, hosts=several)


def test_one_host_is_as_it_was(layout: RunLayout) -> None:
    assert plan_host(options(), layout) is None
    with pytest.raises(JoinError, match="--gateways 0"):
        plan_host(options(gateways=0), layout)


def test_the_first_host_has_a_redis_for_the_others_and_a_key_that_is_made(layout: RunLayout) -> None:
    plan = plan_host(options(fabric_host="192.0.2.1", host="a"), layout)
    assert plan == HostPlan("a", "192.0.2.1", 7420, layout.join_dir / KEY_FILE_NAME, 6379)
    assert not layout.state_dir.exists(), "nothing was changed"


def test_one_that_joins_needs_the_key(layout: RunLayout) -> None:
    with pytest.raises(JoinError, match="copy it from the first host"):
        plan_host(options(REDIS, joins=True, fabric_host="192.0.2.2"), layout)
    ensure_key(layout.state_dir / "other.key")
    key_file = str(layout.state_dir / "other.key")
    plan = plan_host(options(REDIS, joins=True, fabric_host="192.0.2.2", fabric_key_file=key_file), layout)
    assert plan is not None
    assert plan.key_file == Path(key_file)
    assert plan.redis_port is None, "no second Redis"


def test_a_key_that_was_named_is_never_made(layout: RunLayout) -> None:
    with pytest.raises(JoinError, match="cannot be read"):
        plan_host(options(fabric=True, fabric_key_file=str(layout.state_dir / "typo.key")), layout)


def test_with_certificates_no_key_is_needed(
    layout: RunLayout, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("TRIPTYCH_FABRIC_TLS_CERT_FILE", str(tmp_path / "agent.crt"))
    plan = plan_host(options(REDIS, joins=True, fabric_host="192.0.2.2"), layout)
    assert plan is not None
    assert plan.key_file is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_addresses_are_none_that_others_reach(layout: RunLayout, address: str) -> None:
    with pytest.raises(JoinError, match="stands for all addresses"):
        plan_host(options(fabric_host=address), layout)


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:6379", "redis://localhost:6379", "unix:///run/redis.sock", "redis://[::1]:6379"],
)
def test_a_redis_that_others_cannot_reach_is_refused(layout: RunLayout, url: str) -> None:
    with pytest.raises(JoinError, match="do not reach this Redis"):
        plan_host(options(url, fabric_host="192.0.2.1"), layout)
    assert plan_host(options(url, fabric=True), layout) is not None, "run directories of one machine do"


@pytest.mark.parametrize("url", ["http://x", "redis://h:port", "redis://[::1", "://"])
def test_a_url_that_names_no_redis_is_refused_whatever_else_is_given(layout: RunLayout, url: str) -> None:
    for others in ({"joins": True}, {"joins": True, "fabric_host": "192.0.2.2"}, {"fabric": True}):
        with pytest.raises(JoinError, match="the URL of Redis"):
            plan_host(options(url, **others), layout)


def test_the_address_of_one_that_joins_is_that_towards_redis(layout: RunLayout) -> None:
    ensure_key(layout.join_dir / KEY_FILE_NAME)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        plan = plan_host(options(url, joins=True), layout)
    assert plan is not None
    assert plan.address == "127.0.0.1"


@pytest.mark.parametrize(("wanted", "expected"), [("b", "b"), ("rack-3.gpu_1", "rack-3.gpu_1")])
def test_names_of_hosts(wanted: str, expected: str) -> None:
    assert host_name(wanted) == expected


@pytest.mark.parametrize("wanted", ["a b", "a:b", "", "x" * 101])
def test_names_that_instances_could_not_hold(wanted: str) -> None:
    with pytest.raises(JoinError, match="letters, digits"):
        host_name(wanted)


def test_the_machines_name_is_made_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Müller's box")
    assert host_name(None) == "M-ller-s-box"


def test_what_is_joined_is_a_url_or_the_first_hosts_folder(tmp_path: Path) -> None:
    assert join_target(REDIS).redis_url == REDIS
    write_private(tmp_path / URL_FILE_NAME, f"{REDIS}\n")
    target = join_target(str(tmp_path))
    assert (target.redis_url, target.folder) == (REDIS, tmp_path)
    (tmp_path / URL_FILE_NAME).chmod(0o644)
    for wrong in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(JoinError, match="--join needs"):
            join_target(str(wrong))


def test_a_port_that_is_taken_and_an_address_of_another_machine() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(JoinError, match=f"port {port} .*--fabric-port"):
            check_ports(HostPlan("a", "127.0.0.1", port, None, None), ())
        with pytest.raises(JoinError, match=f"port {port} .*--redis-port"):
            check_ports(HostPlan("a", "127.0.0.1", 0, None, port), ())
    with pytest.raises(JoinError, match="an address of this machine"):
        check_ports(HostPlan("a", "192.0.2.1", 7420, None, None), ())
