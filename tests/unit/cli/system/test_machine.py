"""What the machine has: which part of a GPU the store's slab is, which cores engines may use; and options."""

import random
import socket
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych_cli.options import HostOptions, LocalEncode, SystemOptions
from triptych_cli.roles import RoleCounts
from triptych_cli.settings import CliSettings
from triptych_cli.system import machine
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import (
    LaunchError,
    cores_of_engines,
    free_ports,
    gpu_bytes,
    resolve,
    slab_share,
    with_slab,
)
from triptych_cli.system.resolved_options import HostPlan, ResolvedOptions

GIB = 1 << 30


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What nvidia-smi answers."""
    answer: dict[str, Any] = {"stdout": "24576\n", "returncode": 0}

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        answer["asked"] = command
        if "error" in answer:
            raise answer["error"]
        return subprocess.CompletedProcess(command, answer["returncode"], answer["stdout"], "")

    monkeypatch.setattr(subprocess, "run", run)
    return answer


def test_the_first_gpu_is_asked(smi: dict[str, Any]) -> None:
    assert slab_share(6 * GIB, ("3", "0")) == 0.25
    assert "--id=3" in smi["asked"]


def test_without_a_slab_or_a_gpu_nvidia_smi_is_not_run(smi: dict[str, Any]) -> None:
    assert slab_share(0, ("0",)) == slab_share(6 * GIB, ()) == 0.0
    assert "asked" not in smi


def test_more_than_there_is(smi: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="more than GPU 0 has"):
        slab_share(24 * GIB, ("0",))


@pytest.mark.parametrize(
    "changes",
    [{"stdout": "[N/A]"}, {"returncode": 9}, {"error": FileNotFoundError()},
     {"error": subprocess.TimeoutExpired("nvidia-smi", 20)}],
)  # fmt: skip
def test_what_nvidia_smi_does_not_report_ends_the_start(smi: dict[str, Any], changes: dict[str, Any]) -> None:
    smi.update(changes)
    assert gpu_bytes("0") is None
    with pytest.raises(LaunchError, match="does not report"):
        slab_share(GIB, ("0",))


SHARED = ResolvedOptions(model="m", model_is_local=False, gateway_port=1, gpus=("0",))
HOST = HostPlan("a", "192.0.2.1", 7420, Path("/keys/fabric.key"), None)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_bindings", lambda: True)


@pytest.mark.usefixtures("smi", "bindings")
@pytest.mark.parametrize(
    "options",
    [
        SHARED,
        replace(SHARED, gpus=("3", "4"), counts=RoleCounts(encoders=1, prefill_decodes=2)),
        replace(SHARED, counts=RoleCounts(encoders=1, prefills=1, decodes=1)),
    ],
)
def test_an_encoder_and_text_on_one_gpu_have_a_slab(options: ResolvedOptions) -> None:
    found = with_slab(options, CliSettings())
    assert found.slab_bytes == 490 << 20
    assert found.slab_share == pytest.approx(0.02, abs=0.001)


@pytest.mark.usefixtures("smi", "bindings")
@pytest.mark.parametrize(
    "options",
    [
        replace(SHARED, gpus=()),
        replace(SHARED, gpus=("0", "1")),  # one each
        replace(SHARED, counts=RoleCounts(encoders=2)),
        replace(SHARED, counts=RoleCounts(prefill_decodes=2)),
        replace(SHARED, counts=RoleCounts(encoders=1, decodes=1)),
        replace(SHARED, gpus=("0", "1"), prefill_decode_args=("-tp", "2")),  # it cannot map the slab
        replace(SHARED, host=HOST),
    ],
)
def test_nothing_is_taken_of_a_gpu_where_no_tensor_would_lie(options: ResolvedOptions) -> None:
    assert with_slab(options, CliSettings()) == options


@pytest.mark.usefixtures("smi")
def test_without_bindings_or_with_another_transport_there_is_no_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_bindings", lambda: False)
    assert with_slab(SHARED, CliSettings()).slab_bytes == 0
    monkeypatch.setattr(machine, "has_bindings", lambda: True)
    assert with_slab(SHARED, CliSettings(transport="pinned_shm")).slab_bytes == 0


@pytest.mark.usefixtures("bindings")
@pytest.mark.parametrize("slab_bytes", [0, 6 * GIB])
def test_the_users_slab_wins(smi: dict[str, Any], slab_bytes: int) -> None:
    found = with_slab(SHARED, CliSettings(slab_bytes=slab_bytes))
    assert (found.slab_bytes, found.slab_share) == (slab_bytes, slab_bytes / (24 * GIB))


@pytest.mark.usefixtures("bindings")
def test_a_part_of_a_gpu_of_unknown_size_has_no_slab(smi: dict[str, Any]) -> None:
    smi["stdout"] = "[N/A]"
    assert with_slab(replace(SHARED, gpus=("MIG-2f2c",)), CliSettings()).slab_bytes == 0


THREAD_VARIABLES = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "usable_cores", lambda: (1, 3, 5, 7))
    monkeypatch.setattr(machine, "core_quota", lambda: None)
    return monkeypatch


@pytest.mark.parametrize(("quota", "cores"), [(None, (1, 3, 5, 7)), (2.5, (1, 3)), (0.5, (1,))])
def test_quota_leaves_some_of_the_cores(
    four_cores: pytest.MonkeyPatch, quota: float | None, cores: tuple[int, ...]
) -> None:
    four_cores.setattr(machine, "core_quota", lambda: quota)
    assert cores_of_engines() == cores


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_threads_that_the_user_set_are_left_alone(four_cores: pytest.MonkeyPatch, name: str) -> None:
    four_cores.setenv(name, "3")
    assert cores_of_engines() == ()


@pytest.mark.parametrize("local_encode", [None, "off"])
def test_without_encoders_and_towers_no_image_could_be_served(
    local_encode: LocalEncode | None, tmp_path: Path
) -> None:
    options = SystemOptions("m", 0, 1, None, 8000, None, "", "", local_encode=local_encode)
    with pytest.raises(LaunchError, match="--local-encode"):
        resolve(options, RunLayout(tmp_path, tmp_path), deployment="default")


def test_no_other_process_gets_the_same_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor this one again, also while nothing is bound yet."""
    first = random.randrange(machine._FIRST_PORT, 32_000, 40)  # as many run at once
    monkeypatch.setattr(machine, "_FIRST_PORT", first)
    monkeypatch.setattr(machine, "_MAX_PORT_TRIES", 40)
    monkeypatch.setattr(machine, "_end_of_ports", lambda: first + 40)
    found = free_ports(5)
    code = (
        "from triptych_cli.system import machine; machine._MAX_PORT_TRIES = 40; "
        f"machine._FIRST_PORT = {first}; "
        f"machine._end_of_ports = lambda: {first + 40}; print(*machine.free_ports(20))"
    )
    others = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {*found} & {int(each) for each in others.split()}
    assert not {*found} & {*free_ports(20)}


def test_the_next_start_of_the_same_system_gets_the_same_ports() -> None:
    """Prometheus finds it again; one that another process has taken is replaced alone."""
    system = f"/run/{uuid.uuid4().hex}"  # tests of others on this machine have ports of their own
    code = f"from triptych_cli.system.machine import free_ports; print(*free_ports(4, of='{system}'))"

    def ports() -> list[str]:
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        return done.stdout.split()

    first = ports()
    assert ports() == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(first[1])))
        taken.listen()
        assert set(first) - set(ports()) == {first[1]}


def test_a_port_is_tried_where_the_gateway_will_listen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=r"127\.0\.0\.2.*TRIPTYCH_HOST"):
            machine.require_free(port, host="127.0.0.2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gateways": 0, "min_encoders": 0, "hosts": HostOptions(fabric=True)}, "--gateways 1"),
        ({"min_prefill_decodes": 0}, "begin at"),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = SystemOptions("m", 3, 2, None, 8000, None, "", "", **changes)
    with pytest.raises(LaunchError, match=message):
        resolve(options, RunLayout(tmp_path, tmp_path), deployment="default")
