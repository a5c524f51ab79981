"""A step with a late prompt has the cores of encoders that encode."""

from contextlib import closing
from pathlib import Path
from typing import Any

from triptych_common.cores.board import CoreBoard
from triptych_common.cores.sharing import Work
from triptych_vllm_connector.worker.cores.core_share import CoreShare


class OneThread:
    """OpenMP of a team that is the calling thread alone."""

    def __init__(self) -> None:
        self.number = 1

    def num_threads(self) -> int:
        return self.number

    def set_num_threads(self, num_threads: int) -> None:
        self.number = num_threads

    def team(self, num_threads: int) -> frozenset[int]:
        return frozenset()


def test_for_that_step_alone(tmp_path: Path) -> None:
    path, places, openmp = tmp_path / "store.sock.cores", list[set[int]](), OneThread()
    any_openmp: Any = openmp
    with closing(CoreBoard.open(path, [1])) as encoder, closing(CoreBoard.open(path, [0])) as board:
        share = CoreShare(
            "text_first", [0], [0, 1], board, any_openmp, lambda thread, cores: places.append(set(cores))
        )
        encoder.publish(Work.ENCODE)
        share.start_step(Work.PREFILL, is_late=True)
        assert places[-1] == {0, 1}
        share.end_step()
        share.start_step(Work.PREFILL)
        assert places[-1] == {0}
