"""Who does not belong to the fabric reads and writes nothing, and is cut off in bounded time."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fabric.conftest import MakeHost, by_each_transport_in_time
from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.authority import Authority
from tests.support.fabric.fabric_host import FabricHost
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.waiting import until, wait_until
from triptych_common.protocol.transfers import TransferFailureKind

HASH = f"{1:064x}"
DATA = random.Random(1).randbytes(2 << 20)
NOT_TRUSTED, OURS_NOT_TRUSTED = "its certificate is not trusted here", "it does not trust our certificate"
NOT_LET_IN = (TransferFailureKind.REFUSED, TransferFailureKind.UNREACHABLE)


@pytest.fixture
def authority(run_dir: Path) -> Authority:
    return Authority(run_dir, "fabric")


async def assert_not_let_in(
    source: FabricHost,
    target: FabricHost,
    gateway: OrderingGateway,
    kinds: tuple[TransferFailureKind, ...] = (TransferFailureKind.REFUSED,),
) -> None:
    source.encode(HASH, DATA)
    assert failed(await gateway.transfer(source, target, HASH)) in kinds
    stats = target.store.stats()
    assert (stats.num_seals_total, stats.num_reservations) == (0, 0)
    source.wait_no_leftovers()


@by_each_transport_in_time
async def test_another_key(make_host: MakeHost, gateway: OrderingGateway, run_dir: Path) -> None:
    other = write_fabric_key(run_dir / "other")
    source, target = make_host("a", f"--fabric-key-file={other}", key=False), make_host("b")
    source.encode(HASH, DATA)
    assert failed(await gateway.transfer(source, target, HASH)) is TransferFailureKind.REFUSED
    await until(lambda: "fabric peer cut off" in target.agent.log())
    assert target.store.stats().num_seals_total == 0


async def test_tls(make_host: MakeHost, gateway: OrderingGateway, authority: Authority) -> None:
    source = make_host("a", *authority.options("a"), key=False)
    target = make_host("b", *authority.options("b"), key=False)
    source.encode(HASH, DATA)
    completed(await gateway.transfer(source, target, HASH))
    assert target.read(HASH) == DATA


async def test_tls_and_a_key(make_host: MakeHost, gateway: OrderingGateway, authority: Authority) -> None:
    source, target = make_host("a", *authority.options("a")), make_host("b", *authority.options("b"))
    source.encode(HASH, DATA)
    completed(await gateway.transfer(source, target, HASH))
    assert target.read(HASH) == DATA


async def test_a_certificate_of_another_authority(
    make_host: MakeHost, gateway: OrderingGateway, authority: Authority, run_dir: Path
) -> None:
    stranger = Authority(run_dir, "stranger").options("a", ca=authority.ca_file)
    source = make_host("a", *stranger, key=False)
    target = make_host("b", *authority.options("b"), key=False)
    await assert_not_let_in(source, target, gateway)
    await until(lambda: NOT_TRUSTED in target.agent.log())
    await until(lambda: OURS_NOT_TRUSTED in source.agent.log())


async def test_a_target_of_another_authority(
    make_host: MakeHost, gateway: OrderingGateway, authority: Authority, run_dir: Path
) -> None:
    """The source sends it nothing."""
    other = Authority(run_dir, "stranger")
    target = make_host("b", *other.options("b", ca=authority.ca_file), key=False)
    source = make_host("a", *authority.options("a"), key=False)
    await assert_not_let_in(source, target, gateway)
    await until(lambda: NOT_TRUSTED in source.agent.log())
    await until(lambda: OURS_NOT_TRUSTED in target.agent.log())


async def test_no_tls_against_tls(
    make_host: MakeHost, gateway: OrderingGateway, authority: Authority
) -> None:
    await assert_not_let_in(make_host("a"), make_host("b", *authority.options("b")), gateway, NOT_LET_IN)


async def test_tls_against_no_tls(
    make_host: MakeHost, gateway: OrderingGateway, authority: Authority
) -> None:
    await assert_not_let_in(make_host("a", *authority.options("a")), make_host("b"), gateway, NOT_LET_IN)


def test_silent_connections_are_cut_off_and_bounded(make_host: MakeHost) -> None:
    target = make_host("b")
    silent = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(40)]
    for sock in silent:
        sock.settimeout(10.0)
        try:
            assert sock.recv(1) == b"", "nothing is said to a stranger"
        except ConnectionResetError:
            pass
        sock.close()
    wait_until(lambda: "fabric connection turned away" in target.agent.log(), 10, "it is logged")


@pytest.mark.parametrize("mode", [None, 0o644])
def test_without_a_safe_key_it_does_not_start(run_dir: Path, redis_url: str, mode: int | None) -> None:
    options = []
    if mode is not None:
        key = write_fabric_key(run_dir / "key")
        key.chmod(mode)
        options = [f"--fabric-key-file={key}"]
    ended = subprocess.run(
        [sys.executable, "-m", "triptych_fabric", f"--run-dir={run_dir}", *options],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert b"the fabric" in ended.stderr
