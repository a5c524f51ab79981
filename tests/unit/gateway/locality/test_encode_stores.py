"""Which stores have encoders, by the registry, and how long a job waits at each."""

import math
import time
from typing import Any

import pytest

from triptych_common.coordination.single_flight import Backlog
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord, Modality, Role
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.locality.encode_stores import (
    READ_HOLDS_S,
    EncodeStores,
    JobPlace,
    PlaceReason,
    TransferSeconds,
)
from triptych_gateway.settings import TransferSettings

DIGEST, OTHER = "d" * 64, "e" * 64
HASH = MmHash("a" * 64)
LINK = TransferSettings(link_bytes_per_s=1e6, link_round_trip_s=1e-12)


def encoder(name: str, store: str | None, **fields: Any) -> InstanceRecord:
    values: dict[str, Any] = {"row_s": 0.001, "num_slots": 2, "namespace_digest": DIGEST}
    return InstanceRecord(instance=name, boot_id="b", role=Role.ENCODE, store=store, **values | fields)


def consumer(name: str, store: str) -> InstanceRecord:
    return InstanceRecord(
        instance=name, boot_id="b", role=Role.PREFILL_DECODE, store=store, namespace_digest=DIGEST
    )


class Bench:
    def __init__(self, *records: InstanceRecord, measured_s: TransferSeconds | None = None) -> None:
        self.records = records
        options: dict[str, Any] = {} if measured_s is None else {"measured_s": measured_s}
        self.stores = EncodeStores(lambda: self.records, settings=LINK, **options)

    def choose(self, **changes: Any) -> JobPlace:
        values: dict[str, Any] = {
            "num_rows": 100,
            "prefill_decode": "pd-a",
            "num_own": {},
            "only_near": None,
            "now": 0.0,
        }
        return self.stores.choose(DIGEST, HASH, Modality.IMAGE, None, **values | changes)


TWO = (encoder("e-a", "a"), encoder("e-b", "b"), consumer("pd-a", "a"), consumer("pd-b", "b"))


def test_stores_with_encoders_of_the_namespace_that_do_not_drain() -> None:
    bench = Bench(*TWO, encoder("e-c", "c", draining=True), encoder("e-d", "d", namespace_digest=OTHER))
    assert bench.stores.stores_of(DIGEST) == ("a", "b")
    assert bench.stores.stores_of(OTHER) == ("d",)
    assert bench.stores.has_encoders(DIGEST)


def test_an_encoder_that_names_no_store_is_at_the_default_one() -> None:
    assert Bench(encoder("e", None)).stores.stores_of(DIGEST) == (DEFAULT_STORE,)


def test_without_encoders_where_there_were_some_last() -> None:
    bench = Bench()
    assert bench.choose() == JobPlace(DEFAULT_STORE, PlaceReason.NO_ENCODER, 0)
    bench.records = (consumer("pd-a", "a"),)
    assert bench.choose() == JobPlace("a", PlaceReason.NO_ENCODER, 0)
    bench.records = (encoder("e-b", "b"),)
    assert bench.stores.stores_of(DIGEST) == ("b",)
    bench.records = ()
    assert not bench.stores.has_encoders(DIGEST)
    assert bench.choose() == JobPlace("b", PlaceReason.NO_ENCODER, 0)


def test_near_the_instance_that_needs_the_item() -> None:
    bench = Bench(*TWO)
    assert bench.choose(prefill_decode="pd-a").store == "a"
    assert bench.choose(prefill_decode="pd-b").store == "b"
    assert bench.choose(prefill_decode="pd-a", target="b").store == "b", "its request has moved there"
    assert bench.choose(prefill_decode="pd-unknown").reason is PlaceReason.ANYWHERE


def num_near(bench: Bench, **changes: Any) -> int:
    """Own jobs near, from which on the next one goes elsewhere."""
    return next(num for num in range(1000) if bench.choose(num_own={"a": num}, **changes).store == "b")


def test_elsewhere_when_the_near_wait_exceeds_the_transfer() -> None:
    """100 rows of 8 KiB take 0.82 s; a job of 1,280 rows takes 1.28 s."""
    bench = Bench(*TWO)
    assert num_near(bench) == 1
    assert num_near(bench, num_rows=1000) == 7


def test_several_encoders_of_a_store_work_at_once() -> None:
    assert num_near(Bench(*TWO, encoder("e-a2", "a")), num_rows=1000) == 13


def test_an_encoder_that_has_not_said_how_fast_it_is_counts_as_the_others() -> None:
    assert num_near(Bench(*TWO, encoder("e-a2", "a", row_s=None)), num_rows=1000) == 13
    unknown = (encoder("e-a", "a", row_s=None), encoder("e-b", "b", row_s=None), *TWO[2:])
    assert num_near(Bench(*unknown), num_rows=1000) > 7


def test_the_jobs_of_all_gateways_as_last_read_and_own_ones_since() -> None:
    bench = Bench(*TWO)
    bench.stores.note_backlogs(DIGEST, {"a": Backlog(9, 0.0), "b": Backlog(0, 0.0)}, {"a": 4}, now=0.0)
    assert bench.choose(num_rows=1000, num_own={"a": 4}).reason is PlaceReason.LESS_BUSY
    assert bench.choose(num_rows=1000, num_own={"a": 0}).reason is PlaceReason.NEAR, "four of nine have ended"
    late = bench.choose(num_rows=1000, num_own={"a": 4}, now=READ_HOLDS_S)
    assert late.reason is PlaceReason.NEAR, "what was read is old"


def test_a_measured_link_counts_as_it_was_measured() -> None:
    asked: list[tuple[str, str, int]] = []

    def measured_s(source: str, target: str, num_bytes: int) -> float:
        asked.append((source, target, num_bytes))
        return 60.0

    bench = Bench(*TWO, measured_s=measured_s)
    assert bench.choose(num_own={"a": 40}).reason is PlaceReason.NEAR
    assert set(asked) == {("b", "a", 819_200)}


def test_the_way_from_the_chosen_encoders_is_told() -> None:
    assert Bench(*TWO).choose().transfer_s == 0.0
    assert Bench(*TWO).choose(num_own={"a": 40}).transfer_s == pytest.approx(0.8192)
    only = Bench(encoder("e-b", "b"), consumer("pd-a", "a"), consumer("pd-b", "b"))
    assert only.choose().transfer_s == pytest.approx(0.8192), "one store has encoders, another one the target"
    assert only.choose(prefill_decode="pd-b").transfer_s == 0.0
    assert only.choose(prefill_decode="pd-unknown").transfer_s == 0.0


@pytest.mark.parametrize(("store", "reason"), [("b", PlaceReason.NEAR_FAILED), ("c", PlaceReason.NEAR)])
def test_an_order_for_one_store_goes_there_if_it_has_encoders(store: str, reason: PlaceReason) -> None:
    assert Bench(*TWO).choose(only_near=store).reason is reason


def test_a_namespace_is_served_since_its_first_encoder_came() -> None:
    bench = Bench(encoder("e-0", "a"), consumer("pd-0", "a"))
    now = time.monotonic()
    assert bench.stores.served_s(DIGEST, now) == math.inf, "longer than this gateway runs"
    assert bench.stores.served_s(OTHER, now) == 0.0
    bench.records = (consumer("pd-0", "a"),)
    assert bench.stores.served_s(DIGEST, now) == 0.0
    bench.records = (encoder("e-1", "a"), consumer("pd-0", "a"))
    assert 0.0 <= bench.stores.served_s(DIGEST, time.monotonic()) < 60.0
    bench.records = (encoder("e-1", "a"), encoder("e-2", "a"))
    assert bench.stores.served_s(DIGEST, time.monotonic() + 100.0) >= 100.0, "another changes nothing"
