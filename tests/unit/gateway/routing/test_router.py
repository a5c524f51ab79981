"""Router: load, exclusion, suspicion, namespaces."""

from typing import Any

import pytest

from triptych_common.protocol.messages import Compute, InstanceRecord, Role, Sharing
from triptych_gateway.routing.router import Router, shares_compute, unloaded_adapters

D, X, Y, Z = (digit * 64 for digit in "0123")  # digests of namespaces


def pd(name: str, digest: str = D, **fields: Any) -> InstanceRecord:
    values: dict[str, Any] = {
        "role": Role.PREFILL_DECODE,
        "url": "http://x",
        "model": "m",
        "namespace_digest": digest,
    } | fields
    return InstanceRecord(instance=name, boot_id="b", **values)


def encoder(digest: str, **fields: Any) -> InstanceRecord:
    return InstanceRecord(
        instance=f"e-{digest[0]}", boot_id="b", role=Role.ENCODE, namespace_digest=digest, **fields
    )


def pick(router: Router, records: list[InstanceRecord], **options: Any) -> str | None:
    arguments: dict[str, Any] = {"model": "m", "namespace_digest": None, "exclude": frozenset(), "now": 0.0}
    chosen = router.pick_instance(records, **(arguments | options))
    return None if chosen is None else chosen.instance


def test_fewest_in_flight_then_round_robin() -> None:
    router, records = Router(2.0), [pd("a"), pd("b")]
    assert [pick(router, records) for _ in range(3)] == ["a", "b", "a"]
    router.begin_request("b")
    assert pick(router, records) == "a"
    router.begin_request("a")
    router.begin_request("a")
    assert pick(router, records) == "b"
    router.end_request("a")
    router.end_request("a")
    router.end_request("b")
    assert router.num_in_flight("a") == router.num_in_flight("b") == 0


def test_suspects_are_avoided_for_a_while_but_better_than_none() -> None:
    router, records = Router(2.0), [pd("a"), pd("b")]
    router.avoid_instance("a", now=10.0)
    assert pick(router, records, now=11.0) == "b"
    assert pick(router, records, now=11.0) == "b"
    assert pick(router, records[:1], now=11.0) == "a"
    assert pick(router, records, now=12.5) == "b"  # b was picked before a
    assert pick(router, records, now=12.5) == "a"


def test_an_adapter_is_served_by_those_that_have_it() -> None:
    records = [pd("a"), pd("b", X, adapters=("french",)), pd("c", adapters=("french",), draining=True)]
    assert pick(Router(2.0), records, model="french") == "b"
    assert pick(Router(2.0), records, model="french", namespace_digest=D) is None
    assert pick(Router(2.0), records, model="dutch") is None
    assert {pick(Router(2.0), [record]) for record in records} == {"a", "b", None}, "the model itself, too"


@pytest.mark.parametrize(
    ("after", "unloaded"),
    [
        ([pd("a", adapters=("french", "dutch"))], set()),
        ([pd("a", adapters=("french",))], {"dutch"}),
        ([pd("a")], {"french", "dutch"}),
        ([], set()),  # it ended, and may come back
        ([pd("a").model_copy(update={"boot_id": "another life"})], set()),
        ([pd("b"), pd("a", adapters=("dutch", "greek"))], {"french"}),
    ],
)
def test_adapters_that_a_living_instance_has_no_more(after: list[InstanceRecord], unloaded: set[str]) -> None:
    assert unloaded_adapters([pd("a", adapters=("french", "dutch")), pd("c")], after) == unloaded


@pytest.mark.parametrize(
    ("own", "encoders", "is_shared"),
    [
        (Compute(sharing=Sharing.CORES), [Compute(sharing=Sharing.CORES)], True),
        (
            Compute(sharing=Sharing.TIME_SLICES, gpu="0"),
            [Compute(sharing=Sharing.TIME_SLICES, gpu="0")],
            True,
        ),
        (Compute(sharing=Sharing.MPS, gpu="0"), [Compute(sharing=Sharing.MPS, gpu="1")], False),
        (Compute(sharing=Sharing.CORES), [Compute(sharing=Sharing.CORES), None], False),
        (Compute(sharing=Sharing.CORES), [Compute(sharing=Sharing.NONE)], False),
        (Compute(sharing=Sharing.NONE), [Compute(sharing=Sharing.NONE)], False),
        (Compute(sharing=Sharing.CORES), [], False),
        (None, [Compute(sharing=Sharing.CORES)], False),
    ],
)
def test_who_shares_compute_with_all_encoders(
    own: Compute | None, encoders: list[Compute | None], is_shared: bool
) -> None:
    assert shares_compute(pd("a", compute=own), [encoder(D, compute=each) for each in encoders]) is is_shared
