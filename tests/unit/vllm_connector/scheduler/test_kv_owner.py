"""An engine that prefills says when the lease of a KV cache ends."""

from types import SimpleNamespace
from typing import Any

from triptych_vllm_connector.scheduler.kv_owner import date_leases

ENDS = {"kept": 123.5}


def connector() -> Any:
    def request_finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_kept = request.request_id in ENDS
        return is_kept, {"remote_block_ids": block_ids} if is_kept else None

    scheduler = SimpleNamespace(_reqs_need_send=ENDS, request_finished=request_finished)
    return SimpleNamespace(connector_scheduler=scheduler)


def test_the_end_goes_with_what_the_reader_needs() -> None:
    made = connector()
    date_leases(made)
    finish = made.connector_scheduler.request_finished
    assert finish(SimpleNamespace(request_id="kept"), [1]) == (
        True,
        {"remote_block_ids": [1], "remote_blocks_expiry_time": 123.5},
    )
    assert finish(SimpleNamespace(request_id="freed"), [1]) == (False, None)


def test_engines_without_such_a_connector_are_left_alone() -> None:
    date_leases(None)
    other = SimpleNamespace(connector_scheduler=SimpleNamespace())
    date_leases(other)
    assert not hasattr(other.connector_scheduler, "request_finished")
