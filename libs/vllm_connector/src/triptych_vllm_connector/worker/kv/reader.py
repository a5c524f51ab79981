"""Worker of a decode engine: a read of another engine's KV cache counts only within the lease.

It extends the worker of vLLM's NIXL connector, which reads at any time. The owner sends the lease's end in
`kv_transfer_params`, by its own clock (`scheduler.kv_refusals`); vLLM measured the clocks' difference in the
NIXL handshake.
"""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.seams.replacing import replace
from triptych_vllm_connector.worker.kv.leases import KvLeases

log = get_logger(__name__)


class LeasedPullWorker(NixlPullConnectorWorker):
    """NIXL worker that fails reads which begin or end after the lease."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases = KvLeases(self._lease_extension)
        self._reads: dict[str, Any] = {}  # vLLM's metadata of what is read, by engine request id

    def _nixl_handshake(self, *args: Any, **kwargs: Any) -> tuple[dict[tuple[int, int], str], float]:
        """Handshake with the clock offset at its largest: it is known up to half the round trip."""
        began_at = time.perf_counter()
        agents, clock_offset = super()._nixl_handshake(*args, **kwargs)
        return agents, clock_offset + (time.perf_counter() - began_at) / 2

    def _send_heartbeats(self, metadata: Any) -> None:
        now = time.perf_counter()
        super()._send_heartbeats(metadata)
        if metadata.heartbeat_by_engine:
            self._leases.on_heartbeats(
                (
                    (engine_id, request_id)
                    for engine_id, info in metadata.heartbeat_by_engine.items()
                    if engine_id in self._remote_agents
                    for request_id in info.req_ids
                ),
                now,
            )

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if meta.local_physical_block_ids and meta.remote.engine_id in self._remote_agents:
            if self._is_over(meta):
                self._fail(req_id)
                return
            self._reads[req_id] = meta
        super()._read_blocks_for_req(req_id, meta)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in done:
            meta = self._reads.pop(req_id, None)
            if meta is not None and req_id not in failed and self._is_over(meta):
                self._fail(req_id)
        return done, failed

    def _is_over(self, meta: Any) -> bool:
        remote = meta.remote
        first_end = remote.blocks_expiry_time
        if first_end is not None:  # None: the owner is no engine of Triptych
            first_end -= self._engine_clock_offset[remote.engine_id]
        return self._leases.is_over((remote.engine_id, remote.request_id), first_end, time.perf_counter())

    def _fail(self, req_id: str) -> None:
        log.warning("KV cache not read: its lease is over", engine_request_id=req_id)
        self.xfer_stats.record_kv_expired_req()
        self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)


def read_within_leases() -> None:
    """Make vLLM's NIXL connector use `LeasedPullWorker` in this process."""
    maker = nixl_connector.NixlPullConnector.__init__
    replace(nixl_connector, "NixlPullConnectorWorker", LeasedPullWorker, used_by=(maker,), everywhere=False)
