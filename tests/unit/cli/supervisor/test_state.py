"""The state file: private, atomic, and less important than the system."""

import logging
from pathlib import Path

import pytest

from triptych_cli.supervisor.state import (
    ServiceState,
    ServiceStatus,
    SystemStatus,
    read_status,
    try_write_status,
    write_status,
)


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
    try_write_status(file, system_status().model_copy(update={"model": "other"}))
    assert read_status(file) == system_status()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_no_state_or_a_broken_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    assert read_status(file) is None
    file.write_text("{")
    assert read_status(file) is None
