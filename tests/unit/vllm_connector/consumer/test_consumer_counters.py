"""The consumer's counters feed its host's metrics."""

from tests.support.vllm_connector.fake_engine import fake_request, mm_hash, pinned
from tests.support.vllm_connector.played_engine import Engine
from triptych_vllm_connector import engine_counters
from triptych_vllm_connector.consumer.consumer import PinReply
from triptych_vllm_connector.step_orders import LoadedTensor

A, B = mm_hash("a"), mm_hash("b")


def test_a_wait_is_timed_until_its_request_may_run_or_ends() -> None:
    engine = Engine()
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    for request in (first, second):
        engine.consumer.admit_request(request, 0)
        engine.consumer.on_parked(request.request_id, 1)
    engine.consumer.note_waiting(2, 0)
    changes = engine.consumer.take_changes()
    assert changes[engine_counters.PARKED.name] == {"": 2}
    assert engine_counters.WAIT_S.name not in changes
    engine.inbox.post_event(PinReply(A, pinned(A, 1)))
    engine.consumer.drain_inbox()
    engine.consumer.on_unparked(first.request_id, 2)
    assert engine.consumer.take_changes()[engine_counters.WAIT_S.name] == {"": [0.0]}  # on the test's clock
    engine.finish(first)
    engine.finish(second)  # aborted while it is parked
    assert engine.consumer.take_changes()[engine_counters.WAIT_S.name] == {"": [0.0]}


def test_what_workers_load_and_cannot_load() -> None:
    engine = Engine()
    engine.consumer.on_loaded([LoadedTensor("pinned_shm", 100, 0.001), LoadedTensor("redis", 50, 0.002)])
    engine.consumer.on_loads_failed([A])
    engine.consumer.on_stalled()
    changes = engine.consumer.take_changes()
    assert changes[engine_counters.HANDOVER_BYTES.name] == {"pinned_shm": 100, "redis": 50}
    assert changes[engine_counters.HANDOVER_S.name] == {"pinned_shm": [0.001], "redis": [0.002]}
    assert changes[engine_counters.FAILED_LOADS.name] == {"": 1}
    assert changes[engine_counters.STALLS.name] == {"": 1}
