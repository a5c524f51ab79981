"""Which entries go where when a host is drained: the last used first, and nothing is pushed out for them."""

from typing import Any

from triptych_cli.commands.hosts.mover import Move, TargetRoom, plan_moves, silent_stores, target_rooms
from triptych_common.protocol.messages import FabricEndpoint, FabricLoad, InstanceRecord, Role
from triptych_common.protocol.store import REDIS, EntryInfo, TensorSpec

SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)


def entry(number: int, age_s: float, **changes: Any) -> EntryInfo:
    fields: dict[str, Any] = {"mm_hash": f"{number:064x}", "state": "ready", "spec": SPEC, "age_s": age_s}
    return EntryInfo.model_validate(fields | changes)


def agent(store: str, free: int | None, **changes: Any) -> InstanceRecord:
    load = None if free is None else FabricLoad(num_entries=0, entries_num_bytes=0, free_num_bytes=free)
    return InstanceRecord(
        instance=f"fabric-{store}", boot_id="b", role=Role.FABRIC, store=store,
        fabric=FabricEndpoint(host="192.0.2.1", port=7420, generation=1), fabric_load=load, **changes,
    )  # fmt: skip


def prefill_decode(store: str, **changes: Any) -> InstanceRecord:
    return InstanceRecord(
        instance=f"p-{store}", boot_id="b", role=Role.PREFILL_DECODE, store=store, **changes
    )


def test_entries_are_divided_by_the_room_that_is_left() -> None:
    plan = plan_moves(
        [entry(number, float(number)) for number in range(3)], [TargetRoom("b", 150), TargetRoom("c", 100)]
    )
    assert plan.moves == [Move(f"{0:064x}", 64, "b"), Move(f"{1:064x}", 64, "c"), Move(f"{2:064x}", 64, "b")]


def test_what_no_agent_moves_is_counted_apart() -> None:
    left = [entry(1, 0.0, state="writing"), entry(2, 0.0, memory=REDIS), entry(3, 0.0, spec=None)]
    plan = plan_moves([*left, entry(4, 0.0, state="pinned")], [TargetRoom("b", 1000)])
    assert (plan.num_left, len(plan.moves), plan.without_room) == (3, 1, [])


def test_what_was_moved_before_is_not_moved_again() -> None:
    plan = plan_moves([entry(1, 0.0), entry(2, 0.0)], [TargetRoom("b", 1000)], {f"{1:064x}": "b"})
    assert [each.mm_hash for each in plan.moves] == [f"{2:064x}"]


def test_targets_are_other_stores_beside_which_prompts_are_computed() -> None:
    records = [
        agent("a", 500), agent("b", 1000), agent("c", 2000), agent("d", 3000, draining=True),
        prefill_decode("a"), prefill_decode("b"), prefill_decode("d"),
    ]  # fmt: skip
    assert target_rooms(records, "a") == [TargetRoom("b", 980)]


def test_without_such_any_other_store_will_do() -> None:
    records = [agent("a", 500), agent("b", 1000), prefill_decode("a"), prefill_decode("b", draining=True)]
    assert [each.store for each in target_rooms(records, "a")] == ["b"]


def test_a_store_is_silent_until_its_agent_has_told_its_room() -> None:
    assert silent_stores([agent("a", 500), agent("b", None), agent("c", 1)], "a") == ["b"]
    assert silent_stores([agent("a", None), agent("b", 0)], "a") == [], "of the source no room is needed"
    assert silent_stores([agent("a", 500), prefill_decode("a")], "a") == [], "it is the only host"


def test_a_store_without_its_agent_is_silent_where_prompts_are_computed() -> None:
    assert silent_stores([agent("a", 500), prefill_decode("b"), agent("c", None)], "a") == ["b"]
    ending = [agent("b", 500, draining=True), prefill_decode("b")]
    assert silent_stores([agent("a", 500), *ending], "a") == [], "it ends, and takes nothing"
