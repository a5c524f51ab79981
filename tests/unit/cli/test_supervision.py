"""Delays between restarts, the state file, pictures, sizes: small rules of the command line."""

import logging
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from triptych_cli.commands.demo import load_samples
from triptych_cli.commands.store import format_bytes
from triptych_cli.picture import half_blocks
from triptych_cli.supervisor.service import Backoff
from triptych_cli.supervisor.state import (
    ServiceState,
    ServiceStatus,
    SystemStatus,
    note_status,
    read_status,
    write_status,
)


def test_delays_double_up_to_a_limit() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, calm_s=60.0)
    assert [backoff.next_delay_s(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_long_good_run_starts_the_delays_over() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, calm_s=60.0)
    for _ in range(3):
        backoff.next_delay_s(1.0)
    assert backoff.next_delay_s(61.0) == 0.5


def system_status() -> SystemStatus:
    service = ServiceStatus(name="gateway-0", state=ServiceState.READY, pid=7, since=1.0, log_file="/l")
    return SystemStatus(
        supervisor_pid=1,
        endpoint="http://127.0.0.1:8000/v1",
        redis_url="redis://:secret@there/0",
        deployment="default",
        store_socket="/s",
        traces_dir="/t",
        model="/m",
        services=(service,),
    )


def test_the_state_file_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_status(file, system_status())
    assert read_status(file) == system_status()
    assert file.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_costs_the_state_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "state.json"
    write_status(file, system_status())
    file.with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        write_status(file, system_status())
    note_status(file, system_status().model_copy(update={"model": "other"}))
    assert read_status(file) == system_status()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_no_state_or_a_broken_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    assert read_status(file) is None
    file.write_text("{")
    assert read_status(file) is None


def test_a_picture_becomes_half_as_many_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.png"
    Image.new("RGB", (168, 56), (255, 0, 0)).save(file)
    text = half_blocks(file, height=16)
    lines = text.plain.splitlines()
    assert len(lines) == 8
    assert {len(line) for line in lines} == {48}
    console = Console(force_terminal=True, color_system="truecolor", width=80, record=True)
    with console.capture() as capture:
        console.print(text)
    assert "255;0;0" in capture.get()


def test_longer_samples_are_shown_first(tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text(
        '[{"file": "a.png", "digits": "1"}, {"file": "b.png", "digits": "1 2 3"}]'
    )
    assert [sample.digits for sample in load_samples(tmp_path, 2)] == ["1 2 3", "1"]


def test_bytes_are_shown_with_binary_units() -> None:
    assert [format_bytes(n) for n in (12, 1536, 3 << 20, 5 << 30)] == [
        "12 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
