"""A worker's threads and cores, step by step and layer by layer: OpenMP is counted, the board is real."""

import fcntl
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import nn, zeros

from tests.unit.vllm_connector.worker.cores.conftest import CountedOpenMp, MakeShare, Moves
from triptych_common.cores.board import NUM_SLOTS, CoreBoard
from triptych_common.cores.plan import CorePolicy
from triptych_common.cores.sharing import Work
from triptych_common.protocol.messages import Compute, Sharing
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores import core_share
from triptych_vllm_connector.worker.cores.core_share import CoreShare, OpenMp, before_each_layer


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings, and what is worse."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_encoder_takes_an_idle_core_and_gives_it_back_at_the_next_layer(
    share: MakeShare, text: CoreBoard, moves: Moves
) -> None:
    cores = share()
    cores.start_step(Work.ENCODE)
    cores.start_layer()
    assert moves.places == {0: {0, 1}, 1: {0, 1}}
    text.publish(Work.DECODE)
    cores.start_layer()
    assert moves.places == {0: {0}, 1: {0}}
    assert (cores.range.fewest, cores.range.most) == (1, 2)
    cores.end_step()
    text.publish(Work.PREFILL)
    cores.start_step(Work.ENCODE)
    assert (cores.range.fewest, cores.range.most) == (1, 1)
    text.publish(Work.IDLE)
    cores.start_layer()
    assert moves.places == {0: {0, 1}, 1: {0, 1}}


def test_a_late_prompt_has_the_core_of_an_encode_for_its_step_alone(
    share: MakeShare, text: CoreBoard, moves: Moves
) -> None:
    cores = share()
    text.publish(Work.ENCODE)
    cores.start_step(Work.PREFILL, is_late=True)
    assert moves.places == {0: {0, 1}, 1: {0, 1}}
    cores.end_step()
    cores.start_step(Work.PREFILL)
    assert moves.places == {0: {0}, 1: {0}}


def test_cores_are_chosen_before_each_layer_that_is_watched(
    share: MakeShare, text: CoreBoard, moves: Moves
) -> None:
    cores = share(own=(0,), host=(0, 1))
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    cores.watch_layers(model)
    cores.start_step(Work.ENCODE)
    text.publish(Work.DECODE)
    model.layers[0](zeros(1, 2))
    assert moves.places == {0: {0}, 1: {0}}
    assert cores.compute == Compute(sharing=Sharing.CORES, policy="text_first", cores=(0,))


@pytest.mark.parametrize(("policy", "lowered"), [("text_first", [0, 11]), ("image_first", [])])
def test_the_team_of_an_encoder_comes_after_its_host_where_text_comes_first(
    share: MakeShare, openmp: CountedOpenMp, moves: Moves, policy: CorePolicy, lowered: list[int]
) -> None:
    cores = share(own=(0, 2), host=(0, 1, 2), policy=policy)
    openmp.first_id, moves.ended = 10, {12}  # loading has ended threads; one that it started ends now
    cores.watch_layers(nn.Module())
    assert moves.lowered == lowered


def test_neighbours_see_the_step(share: MakeShare, text: CoreBoard) -> None:
    cores = share()
    cores.start_step(Work.PREFILL)
    assert [load.work for load in text.others()] == [Work.PREFILL]
    cores.end_step()
    assert [load.work for load in text.others()] == [Work.IDLE]


def test_number_of_threads_follows_from_the_step_alone(
    share: MakeShare, text: CoreBoard, openmp: CountedOpenMp
) -> None:
    cores = share()
    for load in (Work.DECODE, Work.IDLE):
        text.publish(load)
        for work in (Work.PREFILL, Work.DECODE, Work.ENCODE, Work.DECODE):
            cores.start_step(work)
            cores.end_step()
    assert openmp.numbers == [2, 1, 2, 1, 2, 1, 2, 1]
    assert openmp.teams == [2]  # the runtime keeps the larger team while one thread works


def test_team_of_several_is_looked_up_again_when_its_size_changes(
    share: MakeShare, openmp: CountedOpenMp
) -> None:
    """The runtime ends threads when such a team gets smaller, and starts others when it grows."""
    cores = share(own=(0, 1), host=(0, 1, 2, 3))
    for work in (Work.DECODE, Work.DECODE, Work.PREFILL):
        cores.start_step(work)
    assert openmp.numbers == [4, 2, 4]
    assert openmp.teams == [4, 2, 4]


def test_number_that_a_library_set_is_set_back(share: MakeShare, openmp: CountedOpenMp) -> None:
    """As torch does at the first operation of a thread."""
    cores = share()
    openmp.number = 1
    cores.start_step(Work.ENCODE)
    assert openmp.number == 2


def test_threads_that_the_runtime_replaced_are_moved(
    share: MakeShare, text: CoreBoard, openmp: CountedOpenMp, moves: Moves
) -> None:
    cores = share(own=(0, 2), host=(0, 1, 2, 3))
    cores.start_step(Work.ENCODE)
    moves.ended, openmp.first_id = {1, 2, 3}, 10
    text.publish(Work.DECODE)
    moves.order.clear()
    cores.start_layer()
    assert moves.order[0] == 0, "what starts meanwhile runs where the calling thread does"
    assert all(moves.places[thread] == {0, 2, 3} for thread in (0, 11, 12, 13))
    text.publish(Work.IDLE)
    cores.end_step()
    text.close()
    cores.start_step(Work.ENCODE)
    assert all(moves.places[thread] == {0, 1, 2, 3} for thread in (0, 11, 12, 13))
    assert openmp.teams == [4, 4]


def test_team_of_another_size_is_put_in_its_place_though_that_is_the_same(
    share: MakeShare, openmp: CountedOpenMp, moves: Moves
) -> None:
    """Some of its threads may have been started before the last move, and not been known to it."""
    cores = share(own=(0, 1), host=(0, 1, 2, 3))
    cores.start_step(Work.DECODE)
    cores.end_step()
    openmp.first_id = 10
    cores.start_step(Work.PREFILL)
    assert all(moves.places[thread] == {0, 1, 2, 3} for thread in (0, 11, 12, 13))


def test_core_that_was_taken_away_is_reported_once_and_tried_again(
    share: MakeShare, text: CoreBoard, moves: Moves, log_lines: Callable[[], list[str]]
) -> None:
    cores = share()
    moves.error = OSError(22, "Invalid argument")
    text.publish(Work.DECODE)
    cores.start_step(Work.ENCODE)
    cores.start_layer()
    assert cores.range.most == 1
    assert log_lines() == ["cores not available"]
    moves.error = None
    cores.start_layer()
    assert moves.places == {0: {0}, 1: {0}}


def test_board_that_cannot_be_read_leaves_the_own_cores(
    share: MakeShare,
    text: CoreBoard,
    moves: Moves,
    log_lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = share()
    cores.start_step(Work.ENCODE)
    text.publish(Work.PREFILL)
    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "fcntl", raises(OSError(37, "No locks available")))
        cores.start_layer()
    cores.end_step()
    text.close()
    cores.start_step(Work.ENCODE)
    assert (cores.range.fewest, cores.range.most) == (1, 1)
    assert moves.places == {0: {0}, 1: {0}}
    assert log_lines() == ["cores no longer shared"]


def test_layer_outside_a_step_changes_nothing(share: MakeShare, text: CoreBoard, moves: Moves) -> None:
    """As when vLLM measures the encoder's memory at the start."""
    cores = share()
    text.publish(Work.DECODE)
    cores.start_layer()
    assert moves.places == {}


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


class Host:
    """Which cores and which OpenMP `CoreShare.open` finds."""

    def __init__(self, path: Path, openmp: CountedOpenMp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._openmp = openmp
        self._patch = monkeypatch
        self._patch.setattr(OpenMp, "of_process", lambda: openmp)
        self.set(num_cores=16, quota=None)

    def set(self, num_cores: int, quota: float | None) -> None:
        self._patch.setattr(core_share, "usable_cores", lambda: tuple(range(num_cores)))
        self._patch.setattr(core_share, "core_quota", lambda: quota)

    def open(self, *own: int) -> CoreShare | None:
        self._openmp.number = len(own)
        config = ConnectorConfig(
            instance="encoder-0",
            deployment="test",
            redis_url="unix:///nowhere",
            store_socket=self.path.with_suffix(""),
            namespace_digest="0" * 16,
            cores=own,
        )
        return CoreShare.open(config, num_ranks=1)


@pytest.fixture
def host(path: Path, openmp: CountedOpenMp, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(path, openmp, monkeypatch)


@pytest.mark.parametrize(
    ("quota", "own", "num_cores", "team"),
    [
        (4.0, (0, 1), 4, 4),
        (4.9, (2, 3), 4, 4),
        (3.0, (1, 2), 3, 3),
        (None, tuple(range(7)), 14, 14),  # two of sixteen are left to the gateway, Redis and the like
        (8.0, (0, 1, 2), 7, 6),
    ],
)
def test_cores_beyond_the_quota_and_spare_ones_are_not_borrowed(
    host: Host,
    openmp: CountedOpenMp,
    monkeypatch: pytest.MonkeyPatch,
    quota: float | None,
    own: tuple[int, ...],
    num_cores: int,
    team: int,
) -> None:
    placed: dict[int, set[int]] = {}
    monkeypatch.setattr(CoreShare.__init__, "__defaults__", (placed.__setitem__, print))  # `move`, `lower`
    host.set(16, quota)
    cores = host.open(*own)
    assert cores is not None
    with closing(cores):
        cores.start_step(Work.ENCODE)
        assert placed == {thread: set(range(num_cores)) for thread in range(team)}
        assert cores.range.most == num_cores


@pytest.mark.parametrize("quota", [1.5, 2.0])
def test_nothing_is_shared_where_the_quota_covers_the_own_cores_alone(host: Host, quota: float) -> None:
    host.set(16, quota)
    assert host.open(0, 1) is None if quota == 2.0 else host.open(0) is None
    assert not host.path.exists()


def test_openmp_that_cannot_be_looked_at_leaves_the_worker_as_it_is(
    host: Host, openmp: CountedOpenMp, monkeypatch: pytest.MonkeyPatch, log_lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(openmp, "team", raises(OSError(11, "no thread")))
    assert host.open(0) is None
    for board in [CoreBoard.open(host.path, [1]) for _ in range(NUM_SLOTS)]:  # its slot is free again
        board.close()
    monkeypatch.setattr(OpenMp, "of_process", raises(PermissionError(13, "maps")))
    assert host.open(0) is None
    assert log_lines() == ["cores not shared"] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, values: Any) -> Any:
        for part in self.parts:
            values = part(values)
        return values


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, values: Any) -> Any:
        for block in self.blocks:
            values = block(values)
        return values


def test_action_comes_before_each_outer_layer() -> None:
    calls: list[int] = []
    tower = Tower()
    expected = tower(zeros(1, 2))
    assert before_each_layer(tower, lambda: calls.append(1)) == 3
    assert tower(zeros(1, 2)).equal(expected)
    assert len(calls) == 3
