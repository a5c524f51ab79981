"""The board between two processes: what one writes the other reads, and a process that is killed is gone."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from triptych_common.cores.board import CoreBoard
from triptych_common.cores.sharing import Work, cores_for

TIMEOUT_S = 60
WORKER = """
import sys
from pathlib import Path
from triptych_common.cores.board import CoreBoard
from triptych_common.cores.sharing import Work

board = CoreBoard.open(Path(sys.argv[1]), [int(sys.argv[2])])
print("ready", flush=True)
for line in sys.stdin:
    board.publish(Work[line.strip()])
    print("done", flush=True)
"""


class OtherEngine:
    """A process with a slot, which publishes what it is told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def publish(self, work: Work) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(work.name + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)


@contextmanager
def other_engine(path: Path, core: int) -> Iterator[OtherEngine]:
    command = [sys.executable, "-c", WORKER, str(path), str(core)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield OtherEngine(process)
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sock.cores"


def encode_cores(board: CoreBoard, now_ns: int) -> frozenset[int]:
    return cores_for("text_first", frozenset({0}), frozenset({0, 1}), board.others(), now_ns)


def test_cores_are_lent_and_taken_back(path: Path) -> None:
    with closing(CoreBoard.open(path, [0])) as encoder, other_engine(path, 1) as prefill_decode:
        assert encode_cores(encoder, 0) == {0, 1}
        prefill_decode.publish(Work.DECODE)
        assert encode_cores(encoder, encoder.others()[0].since_ns) == {0}
        prefill_decode.publish(Work.IDLE)
        [idle] = encoder.others()
        assert encode_cores(encoder, idle.since_ns) == {0}
        assert encode_cores(encoder, idle.since_ns + 10**9) == {0, 1}


def test_core_of_a_killed_engine_is_idle_and_its_slot_free(path: Path) -> None:
    with closing(CoreBoard.open(path, [0])) as encoder, other_engine(path, 1) as prefill_decode:
        prefill_decode.publish(Work.PREFILL)
        assert encode_cores(encoder, 0) == {0}
        prefill_decode.kill()
        assert encoder.others() == []
        assert encode_cores(encoder, 0) == {0, 1}
        with other_engine(path, 1) as restarted:
            assert encoder.others() == []
            restarted.publish(Work.PREFILL)
            assert [load.work for load in encoder.others()] == [Work.PREFILL]


def test_engine_that_survives_keeps_its_slot(path: Path) -> None:
    with closing(CoreBoard.open(path, [0])) as encoder, other_engine(path, 1) as other:
        encoder.publish(Work.ENCODE)
        other.publish(Work.PREFILL)
        with other_engine(path, 2) as third:
            third.publish(Work.PREFILL)
            assert sorted(core for load in encoder.others() for core in load.cores) == [1, 2]
