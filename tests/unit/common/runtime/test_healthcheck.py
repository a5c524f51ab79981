"""A container's health check ends a service that hangs, and no other."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych_common.runtime import healthcheck
from triptych_common.runtime.healthcheck import HEALTHY, NO_ANSWER, NOT_READY, check_liveness, main_process
from triptych_common.runtime.liveness import HUNG_AFTER_CHECKS

SERVICE = """
import sys, time
if "healthcheck" in sys.argv:
    sys.exit(int(open("code").read()))
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A service that does nothing; its own health check ends with the code in the file `code`."""
    (tmp_path / "idle_service.py").write_text(SERVICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(tmp_path))
    command = [sys.executable, "-m", "idle_service"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def check(code: int, *options: str) -> int:
    """One health check of the container."""
    Path("code").write_text(str(code))
    with pytest.raises(SystemExit) as ended:
        healthcheck.main([*options, "idle_service"])
    return 1 if isinstance(ended.value.code, str) else int(ended.value.code or 0)


def test_a_service_that_was_healthy_and_hangs_is_ended_with_a_line_in_its_log(
    service: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert check(HEALTHY) == 0
    for _ in range(HUNG_AFTER_CHECKS - 1):
        assert check(NO_ANSWER) == 1, "2 is reserved by Docker"
    assert service.poll() is None
    assert check(NO_ANSWER) == 1
    assert service.wait(60) == -signal.SIGKILL
    assert "service hangs" in (tmp_path / "log").read_text()


def test_liveness_reports_a_service_that_hangs_and_kills_nothing(service: subprocess.Popen[bytes]) -> None:
    assert check(NO_ANSWER, "--liveness") == 0, "it starts"
    assert check(HEALTHY, "--liveness") == 0
    assert check(NOT_READY, "--liveness") == 0, "Redis is away"
    assert [check(NO_ANSWER, "--liveness") for _ in range(HUNG_AFTER_CHECKS)][-2:] == [0, 1]
    assert check(NO_ANSWER, "--liveness") == 1, "until the container is restarted"
    assert service.poll() is None


def test_one_that_starts_or_is_not_ready_is_left_alone(service: subprocess.Popen[bytes]) -> None:
    for _ in range(HUNG_AFTER_CHECKS):
        check(NO_ANSWER)  # it was never healthy: it loads a model
    check(HEALTHY)
    for _ in range(HUNG_AFTER_CHECKS):
        check(NOT_READY)  # Redis is away
    assert service.poll() is None


def test_the_process_is_found_among_others(service: subprocess.Popen[bytes]) -> None:
    assert main_process(["idle_service"]) == service.pid
    assert main_process(["idle_service", "fabric"]) is None


def test_one_that_works_is_left_to_work(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            check_liveness(tmp_path / "last", busy.pid, HEALTHY)
            assert not any(
                check_liveness(tmp_path / "last", busy.pid, NO_ANSWER) for _ in range(2 * HUNG_AFTER_CHECKS)
            )
        finally:
            busy.kill()


def test_a_check_of_an_earlier_process_does_not_count(
    service: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "last"
    check_liveness(file, service.pid, HEALTHY)
    file.write_text(file.read_text().replace('"started_at": "', '"started_at": "9'))
    assert not any(check_liveness(file, service.pid, NO_ANSWER) for _ in range(2 * HUNG_AFTER_CHECKS))
