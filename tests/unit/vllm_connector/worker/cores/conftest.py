"""A worker's share of the cores: OpenMP is counted, moves of threads are noted, the board is real."""

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from triptych_common.cores.board import CoreBoard
from triptych_common.cores.plan import CorePolicy
from triptych_vllm_connector.worker.cores.core_share import CoreShare, OpenMp

MakeShare = Callable[..., CoreShare]


class CountedOpenMp:
    """Notes the numbers that were set, and the teams that were asked for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.teams: list[int] = []
        self.first_id = 0  # of the next team that is looked up, beside the calling thread
        self.number = 1

    def num_threads(self) -> int:
        return self.number

    def set_num_threads(self, num_threads: int) -> None:
        self.numbers.append(num_threads)
        self.number = num_threads

    def team(self, num_threads: int) -> frozenset[int]:
        self.teams.append(num_threads)
        return frozenset({0, *range(self.first_id + 1, self.first_id + num_threads)})


class Moves:
    """Where each thread was put last."""

    def __init__(self) -> None:
        self.places: dict[int, set[int]] = {}
        self.order: list[int] = []
        self.ended: set[int] = set()
        self.lowered: list[int] = []  # threads, whose priority was
        self.error: OSError | None = None

    def lower(self, thread: int) -> None:
        self(thread, ())  # it may have ended
        self.lowered.append(thread)

    def __call__(self, thread: int, cores: Collection[int]) -> None:
        if self.error is not None:
            raise self.error
        if thread in self.ended:
            raise ProcessLookupError(3, "No such process")
        self.order.append(thread)
        self.places[thread] = set(cores)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sock.cores"


@pytest.fixture
def text(path: Path) -> Iterator[CoreBoard]:
    with closing(CoreBoard.open(path, [1])) as board:
        yield board


@pytest.fixture
def openmp() -> CountedOpenMp:
    return CountedOpenMp()


@pytest.fixture
def moves() -> Moves:
    return Moves()


@pytest.fixture
def share(path: Path, openmp: CountedOpenMp, moves: Moves) -> Iterator[MakeShare]:
    opened: list[CoreShare] = []

    def make(
        own: Collection[int] = (0,), host: Collection[int] = (0, 1), policy: CorePolicy = "text_first"
    ) -> CoreShare:
        board = CoreBoard.open(path, own)
        opened.append(CoreShare(policy, own, host, board, cast(OpenMp, openmp), moves, moves.lower))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
