"""`./triptych status` on real Redis and a real store: each pair with its transport, and what came by it."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.conftest import EmbeddedRedis
from tests.support.message_samples import instance_record
from tests.support.stores import StoreProcess
from triptych_cli.supervisor.state import (
    LastEnd,
    ServiceState,
    ServiceStatus,
    SystemStatus,
    read_status,
    write_status,
)
from triptych_cli.system.layout import RunLayout
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import Compute, InstanceRecord, Role, Sharing, Transport
from triptych_common.protocol.store import Pinned, PinOrWatch, Reserve, Reserved, Seal, TensorSpec

SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
REGION = (Transport.PINNED_SHM, Transport.REDIS)


@pytest.fixture
def layout(run_dir: Path, redis_url: str) -> Iterator[RunLayout]:
    """As of a system that runs: its state file, and the lock that a supervisor holds."""
    layout = RunLayout(run_dir, run_dir)
    write_status(
        layout.state_file,
        SystemStatus(
            supervisor_pid=os.getpid(),
            endpoint="",
            redis_url=redis_url,
            deployment="default",
            store_socket=str(run_dir / "store.sock"),
            traces_dir="",
            model="",
            services=(),
        ),
    )
    with layout.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield layout


async def shown(layout: RunLayout) -> list[list[str]]:
    """Rows of `status`, while this process goes on registering."""
    return rows((await asyncio.to_thread(status, layout)).stdout)


def status(layout: RunLayout) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRIPTYCH_RUN_DIR": str(layout.run_dir), "COLUMNS": "200"}
    command = [sys.executable, "-m", "triptych_cli", "status"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def rows(output: str) -> list[list[str]]:
    """Columns of the lines below the head of the pairs' table."""
    lines = [line.split() for line in output.splitlines()]
    return lines[lines.index(["from", "to", "transport", "tensors", "so", "far"]) + 1 :]


async def test_each_engine_with_what_it_computes_on(layout: RunLayout, redis_url: str) -> None:
    computes = {
        "encoder-0": Compute(sharing=Sharing.CORES, policy="text_first", cores=(0, 1)),
        "prefill_decode-0": Compute(
            sharing=Sharing.MPS, policy="image_first", gpu="0", num_engines=2, priority="1"
        ),
        "gateway-0": None,
    }
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            await AsyncBus.connect(redis_url, "default", client_name="test")
        )
        for instance, compute in computes.items():
            record = InstanceRecord(instance=instance, boot_id="b", role=Role.ENCODE, compute=compute)
            await stack.enter_async_context(Registry(bus).keep_registered(record))
        lines = [line.split() for line in (await asyncio.to_thread(status, layout)).stdout.splitlines()]
    first = lines.index(["engine", "role", "computes", "on", "shared", "by", "core", "policy"]) + 1
    assert lines[first : first + 2] == [
        ["encoder-0", "encode", "cores", "0-1", "cores", "text_first"],
        [
            "prefill_decode-0",
            "encode",
            *["GPU", "0", "mps", "with", "1", "other,", "below", "normal", "image_first"],
        ],
    ]
    assert lines[first + 2][0] != "gateway-0"


async def test_where_each_service_is_scraped(layout: RunLayout) -> None:
    current = read_status(layout.state_file)
    assert current is not None
    services = [
        ServiceStatus(name=name, state=ServiceState.READY, since=0.0, log_file="", metrics_port=port)
        for name, port in (("redis", None), ("encoder-0", 9464))
    ]
    write_status(layout.state_file, current.model_copy(update={"services": tuple(services)}))
    lines = [line.split() for line in (await asyncio.to_thread(status, layout)).stdout.splitlines()]
    first = lines.index(["metrics", "of", "for", "Prometheus"]) + 1
    assert lines[first] == ["encoder-0", "http://127.0.0.1:9464/metrics"]
    assert lines[first + 1] != ["redis"]


def pass_tensor(daemon: StoreProcess, number: int, memory: str) -> None:
    mm_hash = f"{number:064x}"
    with_encoder = daemon.connect(f"encoder-0/worker-{number}")
    reserved = with_encoder.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC, memory=memory))
    assert isinstance(reserved, Reserved)
    with_encoder.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    with_engine = daemon.connect(f"prefill_decode-0/engine-{number}")
    assert isinstance(with_engine.request(PinOrWatch(seq=0, mm_hash=mm_hash)), Pinned)


async def test_each_pair_with_its_transport(layout: RunLayout, redis_url: str) -> None:
    daemon = StoreProcess(layout.run_dir)
    daemon.start()
    try:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(
                await AsyncBus.connect(redis_url, "default", client_name="test")
            )
            for instance, role, transports in (
                ("encoder-0", Role.ENCODE, REGION),
                ("prefill_decode-0", Role.PREFILL_DECODE, REGION),
                ("encoder-1", Role.ENCODE, (Transport.REDIS,)),
            ):
                record = instance_record(instance, role, namespace_digest="d" * 64, transports=transports)
                await stack.enter_async_context(Registry(bus).keep_registered(record))
            assert await shown(layout) == [
                ["encoder-0", "prefill_decode-0", "pinned_shm", "0"],
                ["encoder-1", "prefill_decode-0", "redis", "0"],
            ]
            pass_tensor(daemon, 1, "shm")
            pass_tensor(daemon, 2, "shm")
            assert (await shown(layout))[0] == ["encoder-0", "prefill_decode-0", "pinned_shm", "2"]
            pass_tensor(daemon, 3, "redis")
            assert (await shown(layout))[0] == [
                "encoder-0", "prefill_decode-0", "pinned_shm", "2", "pinned_shm,", "1", "redis",
            ]  # fmt: skip
    finally:
        daemon.close()


def test_a_store_that_is_away_is_a_note(layout: RunLayout) -> None:
    answer = status(layout)
    assert answer.returncode == 0, answer.stderr
    assert "transports are not known" in answer.stdout


def with_services(layout: RunLayout, *services: ServiceStatus, **changes: object) -> None:
    current = read_status(layout.state_file)
    assert current is not None
    write_status(layout.state_file, current.model_copy(update={"services": services, **changes}))


def ready(name: str, *, is_registered: bool = False, **changes: object) -> ServiceStatus:
    return ServiceStatus(
        name=name, state=ServiceState.READY, since=0.0, log_file="", is_registered=is_registered
    ).model_copy(update=changes)


def row(answer: subprocess.CompletedProcess[str], service: str) -> str:
    return next(line for line in answer.stdout.splitlines() if line.startswith(service))


async def test_an_instance_whose_record_has_expired_does_not_answer(
    layout: RunLayout, redis_url: str
) -> None:
    """Its process lives, as one that was stopped or whose event loop stalls."""
    with_services(layout, ready("encoder-0", is_registered=True), ready("encoder-1", is_registered=True))
    async with await AsyncBus.connect(redis_url, "default", client_name="test") as bus:
        record = InstanceRecord(instance="encoder-0", boot_id="b", role=Role.ENCODE)
        async with Registry(bus).keep_registered(record):
            answer = await asyncio.to_thread(status, layout)
    assert answer.returncode == 1
    assert "ready" in row(answer, "encoder-0")
    assert "unresponsive" in row(answer, "encoder-1")
    assert "does not answer" in row(answer, "encoder-1")


def test_a_redis_that_was_stopped_is_told(layout: RunLayout, own_redis: EmbeddedRedis) -> None:
    with_services(layout, ready("redis"), ready("encoder-0", is_registered=True), redis_url=own_redis.url)
    assert "ready" in row(status(layout), "redis")
    own_redis.freeze()
    answer = status(layout)
    own_redis.thaw()
    assert answer.returncode == 1
    assert "what is registered is not known" in answer.stderr
    assert "unresponsive" in row(answer, "redis")
    assert "ready" in row(answer, "encoder-0"), "it cannot be known"


def test_a_supervisor_that_does_not_answer_is_told(layout: RunLayout) -> None:
    with_services(layout, ready("redis"))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(os.fspath(layout.control_socket))
        control.listen()
        answer = status(layout)
    assert answer.returncode == 1
    assert "the supervisor does not answer" in answer.stderr


def test_what_a_killed_supervisor_left_is_told(run_dir: Path, layout: RunLayout) -> None:
    layout.lock_file.unlink()  # nobody holds it
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as left:
        started_at = psutil.Process(left.pid).create_time()
        with_services(
            layout,
            ready("encoder-0", pid=left.pid, pid_started_at=started_at),
            ready("gateway-0", pid=1, pid_started_at=started_at),
        )
        answer = status(layout)
        left.kill()
    assert answer.returncode == 1
    assert "the supervisor was killed" in answer.stderr
    assert "goes on without a supervisor" in row(answer, "encoder-0")
    assert "stopped" in row(answer, "gateway-0")


def test_the_last_end_of_a_service_is_shown(layout: RunLayout) -> None:
    end = LastEnd(at=time.time(), reason="was ended by signal 9 (Killed)")
    with_services(layout, ready("redis", last_end=end))
    answer = status(layout)
    assert answer.returncode == 0
    assert "ago it was ended by signal 9 (Killed)" in row(answer, "redis")
