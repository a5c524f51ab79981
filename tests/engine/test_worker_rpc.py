"""What a host is told of its workers' cores or GPU. No engine is started."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.protocol.messages import Compute, Sharing

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.worker import rpc
    from triptych_vllm_connector.worker.cores.compute_share import ComputeShare, FixedShare
    from triptych_vllm_connector.worker.rpc import WorkerRpc, compute_of

COMPUTE = Compute(sharing=Sharing.CORES, policy="text_first", cores=(0, 1))


class Engine:
    """vLLM's client: calls the named method of each rank's worker."""

    def __init__(self, num_ranks: int) -> None:
        self._workers = [WorkerRpc() for _ in range(num_ranks)]

    async def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(worker, method)() for worker in self._workers]


@pytest.mark.parametrize(
    ("share", "compute"), [(FixedShare(COMPUTE), COMPUTE), (None, None)], ids=["a share", "none"]
)
async def test_the_first_rank_answers(
    monkeypatch: pytest.MonkeyPatch, share: ComputeShare | None, compute: Compute | None
) -> None:
    monkeypatch.setattr(rpc, "connector_of_worker", lambda: SimpleNamespace(share=share))
    assert await compute_of(Engine(num_ranks=2)) == compute
