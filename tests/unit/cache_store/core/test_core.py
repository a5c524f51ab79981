"""Single behaviours of the core; what holds always is in tests/property/cache_store/test_store_core.py."""

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stores import core_on
from triptych_cache_store.core import state
from triptych_cache_store.core.store_core import StoreCore
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.space import Limits
from triptych_common.protocol import store as wire
from triptych_common.region import records
from triptych_common.region.layout import RegionLayout

BLOCK, NUM_BLOCKS = 4096, 16
LAYOUT = RegionLayout(BLOCK, NUM_BLOCKS, num_pin_records=4, num_client_slots=3)
HASHES = [f"{n:064x}" for n in range(40)]
ENCODER, ENGINE = SessionId(1), SessionId(2)


def spec(num_blocks: int) -> wire.TensorSpec:
    return wire.TensorSpec(shape=(num_blocks, BLOCK // 2), dtype="float16", num_bytes=num_blocks * BLOCK)


class Client:
    """Sends commands of one session and hands back the reply; pushes go to `pushes`."""

    def __init__(self, core: StoreCore, session_id: SessionId, name: str) -> None:
        self.core, self.session_id, self.now = core, session_id, 0.0
        self.pushes: list[wire.StoreReply] = []
        self.welcome = self.send(wire.Hello(seq=1, version=1, client=name))

    def send(self, command: wire.StoreCommand) -> wire.StoreReply:
        first, *rest = self.core.handle(self.session_id, command, self.now)
        self.pushes += [each.reply for each in rest]
        return first.reply

    def reserve(self, number: int, num_blocks: int = 1, **fields: object) -> wire.StoreReply:
        fields = {"seq": 2, "mm_hash": HASHES[number], "spec": spec(num_blocks)} | fields
        return self.send(wire.Reserve.model_validate(fields))

    def put(self, number: int, num_blocks: int = 1, **fields: object) -> int:
        """Reserve and seal; the first block."""
        reserved = self.reserve(number, num_blocks, **fields)
        assert isinstance(reserved, wire.Reserved), reserved
        self.send(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
        return (reserved.offset - LAYOUT.data_offset) // BLOCK

    def pin(self, number: int) -> wire.StoreReply:
        return self.send(wire.PinOrWatch(seq=4, mm_hash=HASHES[number]))

    def states(self) -> str:
        """One letter for each number: r(eady), p(inned), w(riting), a(bsent)."""
        reply = self.send(wire.Lookup(seq=5, mm_hashes=tuple(HASHES[:NUM_BLOCKS])))
        assert isinstance(reply, wire.Entries)
        return "".join(entry.state[0] for entry in reply.entries)


@pytest.fixture
def make_client() -> Callable[..., Client]:
    def make(limits: Limits | None = None) -> Client:
        return Client(
            core_on(bytearray(LAYOUT.data_offset), LAYOUT, limits=limits), ENCODER, "encoder-0/worker-0"
        )

    return make


def code(reply: wire.StoreReply) -> str:
    assert isinstance(reply, wire.StoreFailure), reply
    return reply.code


def test_hello_comes_first_and_once() -> None:
    core = core_on(bytearray(LAYOUT.data_offset), LAYOUT)
    [out] = core.handle(ENCODER, wire.Ping(seq=1), 0.0)
    assert (code(out.reply), out.closes) == ("not_hello", True)
    [out] = core.handle(ENCODER, wire.Hello(seq=1, version=9, client="a"), 0.0)
    assert (code(out.reply), out.closes) == ("bad_version", True)
    client = Client(core, ENCODER, "a")
    [out] = core.handle(ENCODER, wire.Hello(seq=1, version=1, client="a"), 0.0)
    assert (code(out.reply), out.closes) == ("bad_frame", True)
    assert isinstance(client.send(wire.Ping(seq=2)), wire.Done)


def test_no_more_clients_than_slots(make_client: Callable[..., Client]) -> None:
    first = make_client()
    for number in (2, 3):
        assert isinstance(Client(first.core, SessionId(number), f"c{number}").welcome, wire.Welcome)
    assert code(Client(first.core, SessionId(4), "c4").welcome) == "full"
    first.core.disconnect(SessionId(3), 0.0)
    assert isinstance(Client(first.core, SessionId(5), "c5").welcome, wire.Welcome)


def listed(client: Client, after: int | None, limit: int = 3) -> list[int]:
    """One page."""
    command = wire.ListEntries(seq=6, limit=limit, after=None if after is None else HASHES[after])
    reply = client.send(command)
    assert isinstance(reply, wire.Entries)
    return [HASHES.index(each.mm_hash) for each in reply.entries]


def test_pages_of_the_list_have_what_stays_once(make_client: Callable[..., Client]) -> None:
    client = make_client()
    for number in (7, 3, 9, 1, 5):
        client.put(number)
    client.reserve(4)  # one that is being written
    assert listed(client, None) == [1, 3, 4]
    client.send(wire.Evict(seq=7, mm_hash=HASHES[4]))  # is no entry yet: it stays
    client.send(wire.Evict(seq=7, mm_hash=HASHES[1]))
    client.put(0)
    client.put(8)
    client.send(wire.Evict(seq=7, mm_hash=HASHES[7]))
    assert listed(client, 4) == [5, 8, 9]
    assert listed(client, 9) == []
    assert listed(client, None, 100) == [0, 3, 4, 5, 8, 9]


def test_a_page_has_a_bound(make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client()
    for number in range(5):
        client.put(number)
    monkeypatch.setattr(wire, "MAX_LISTED", 4)
    assert listed(client, None, 100) == [0, 1, 2, 3]


def test_watches_keep_the_records_of_their_pins(make_client: Callable[..., Client]) -> None:
    client = make_client()
    client.put(0)
    assert [type(client.pin(number)) for number in (0, 0, 1, 2)] == [
        wire.Pinned,
        wire.Pinned,
        wire.Watching,
        wire.Watching,
    ]
    assert code(client.pin(0)) == code(client.pin(3)) == "full"
    client.put(1)
    client.put(2)
    assert [type(push) for push in client.pushes] == [wire.EntrySealed, wire.EntrySealed]


def test_shape_and_bytes_must_agree(make_client: Callable[..., Client]) -> None:
    client = make_client()
    wrong = wire.TensorSpec(shape=(2, 2), dtype="float32", num_bytes=17)
    assert code(client.reserve(0, spec=wrong)) == "spec_mismatch"
    client.reserve(1, 2)
    assert code(client.reserve(1, 3)) == "spec_mismatch"
    client.put(2, 2)
    assert code(client.reserve(2, 3)) == "spec_mismatch"
    assert isinstance(client.reserve(2, 2), wire.AlreadySealed)


def test_a_large_tensor_takes_the_place_of_cheap_neighbours(make_client: Callable[..., Client]) -> None:
    """Not of the oldest ones wherever they are: 0 is old, but its neighbour 1 is pinned."""
    client = make_client()
    for number in range(NUM_BLOCKS):
        client.now = float(number)
        assert client.put(number) == number
    client.now = 100.0
    client.pin(1)
    assert client.put(20, 4) == 2
    assert client.states() == "rp" + "aaaa" + "r" * 10


def test_what_can_be_evicted_counts_as_free_for_the_reserve(make_client: Callable[..., Client]) -> None:
    client = make_client(Limits(num_reserve_blocks=4))
    for number in range(30):
        client.put(number)
    assert client.core.space.num_evictions == 14


def test_a_tenant_evicts_its_own(make_client: Callable[..., Client]) -> None:
    client = make_client(Limits(tenant_quotas={"small": 3}))
    client.put(0)
    for number in range(1, 6):
        client.put(number, tenant="small")
    assert client.states()[:6] == "raarrr"
    client.pin(5)
    client.pin(4)
    client.pin(3)
    assert code(client.reserve(6, tenant="small")) == "full"
    assert isinstance(client.reserve(6, tenant="other"), wire.Reserved)


def test_relief_goes_from_the_high_to_the_low_watermark(make_client: Callable[..., Client]) -> None:
    client = make_client(Limits(high_watermark=12, low_watermark=8))
    for number in range(12):
        client.put(number)
    assert not client.core.space.needs_relief
    client.put(12)
    assert client.core.space.needs_relief
    assert client.core.space.relieve(2)
    assert not client.core.space.relieve(100)
    assert client.states() == "aaaaa" + "r" * 8 + "aaa"


def test_a_damaged_region_gives_back_what_is_whole() -> None:
    region = bytearray(LAYOUT.data_offset)
    client = Client(core_on(region, LAYOUT), ENCODER, "encoder-0/worker-0")
    for number in range(6):
        client.put(number, 2)
    region[records.entry_offset(LAYOUT, 0) + 40] ^= 1  # its body
    region[records.entry_offset(LAYOUT, 2)] = 77  # its state
    records.write_state(memoryview(region), records.entry_offset(LAYOUT, 5), records.READY)  # inside another
    region[LAYOUT.slots_offset + 30] ^= 1  # the client's name
    core = core_on(region, LAYOUT, generation=2, is_alive=lambda slot: True)
    assert core.num_detached == 0
    assert Client(core, ENGINE, "pd-0/engine").states()[:7] == "aarrrra"
    assert core.space.pool.num_free_blocks == NUM_BLOCKS - 8
    again = core_on(region, LAYOUT, generation=3)
    assert again.table.num_entries == 4


def test_ids_never_come_again_after_a_restart() -> None:
    region = bytearray(LAYOUT.data_offset)
    first = Client(core_on(region, LAYOUT), ENCODER, "encoder-0/worker-0")
    reserved = first.reserve(0)
    assert isinstance(reserved, wire.Reserved)
    core = core_on(region, LAYOUT, generation=1, is_alive=lambda slot: True)
    other = Client(core, ENGINE, "pd-0/engine").reserve(1)
    assert isinstance(other, wire.Reserved)
    assert other.reservation_id > reserved.reservation_id


# ---- device memory -------------------------------------------------------------------------------
SLAB = wire.SlabInfo(
    memory="cuda:GPU-00000000-0000-0000-0000-00000000000a", num_bytes=4 * BLOCK, ipc_handle="0" * 128
)


def with_slab(region: bytearray) -> Client:
    return Client(core_on(region, LAYOUT, slab=SLAB), ENCODER, "encoder-0/worker-0")


def test_the_slab_has_blocks_of_its_own() -> None:
    client = with_slab(bytearray(LAYOUT.data_offset))
    assert isinstance(client.welcome, wire.Welcome)
    assert client.welcome.slab == SLAB
    offsets = []
    for number in range(4):
        reserved = client.reserve(number, memory=SLAB.memory)
        assert isinstance(reserved, wire.Reserved)
        assert reserved.memory == SLAB.memory
        client.send(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
        offsets.append(reserved.offset)
    assert sorted(offsets) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
    pinned = client.pin(2)
    assert isinstance(pinned, wire.Pinned)
    assert (pinned.descriptor.memory, pinned.descriptor.offset) == (SLAB.memory, offsets[2])
    stats = client.send(wire.StatsQuery(seq=9))
    assert isinstance(stats, wire.StoreStats)
    assert stats.free_num_bytes == stats.region_num_bytes == NUM_BLOCKS * BLOCK
    assert (stats.slab_num_bytes, stats.slab_free_num_bytes, stats.num_entries) == (4 * BLOCK, 0, 4)
    again = client.reserve(0)
    assert isinstance(again, wire.AlreadySealed)
    assert again.memory == SLAB.memory


def test_blocks_of_a_cancelled_reservation_are_free_at_once() -> None:
    """Its writer lives and has waited for its GPU."""
    client = with_slab(bytearray(LAYOUT.data_offset))
    reserved = client.reserve(0, 4, memory=SLAB.memory)
    assert isinstance(reserved, wire.Reserved)
    client.send(wire.Cancel(seq=3, reservation_id=reserved.reservation_id))
    assert isinstance(client.reserve(1, 4, memory=SLAB.memory), wire.Reserved)


def test_the_slab_evicts_its_own_and_never_what_is_pinned() -> None:
    client = with_slab(bytearray(LAYOUT.data_offset))
    client.put(9)  # in the region
    for number in range(4):
        reserved = client.reserve(number, memory=SLAB.memory)
        assert isinstance(reserved, wire.Reserved)
        client.send(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
    for number in range(3):
        client.pin(number)
    assert isinstance(client.reserve(5, memory=SLAB.memory), wire.Reserved)
    assert client.states()[:10] == "pppaawaaar"
    assert code(client.reserve(6, memory=SLAB.memory)) == "full"
    assert isinstance(client.reserve(6), wire.Reserved), "the region has room"
    client.send(wire.Evict(seq=8))
    assert client.states()[:3] == "ppp"


def test_a_store_without_that_memory_reports_it(make_client: Callable[..., Client]) -> None:
    assert code(make_client().reserve(0, memory=SLAB.memory)) == "too_large"
    other = SLAB.memory[:-1] + "b"
    assert code(with_slab(bytearray(LAYOUT.data_offset)).reserve(0, memory=other)) == "too_large"
    assert code(with_slab(bytearray(LAYOUT.data_offset)).reserve(0, 5, memory=SLAB.memory)) == "too_large"


def test_pins_are_counted_by_pair_and_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = with_slab(bytearray(LAYOUT.data_offset))
    consumer = Client(producer.core, ENGINE, "pd-0/engine")
    for number, memory in enumerate((SLAB.memory, "shm", "redis")):
        reserved = producer.reserve(number, memory=memory)
        assert isinstance(reserved, wire.Reserved)
        if memory == "redis":
            consumer.pin(number)  # waits: pinned by the seal
        producer.send(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
    consumer.pin(0)
    consumer.pin(1)
    own = producer.pin(1)
    assert isinstance(own, wire.Pinned)
    producer.send(wire.Unpin(seq=5, pin_id=own.pin_id))
    expected = {
        ("encoder-0", "pd-0", "cuda_ipc"): 1,
        ("encoder-0", "pd-0", "pinned_shm"): 1,
        ("encoder-0", "pd-0", "redis"): 1,
        ("encoder-0", "encoder-0", "pinned_shm"): 1,
    }
    assert metrics_of(consumer) == expected
    monkeypatch.setattr(state, "MAX_PAIRS", len(expected))
    another = Client(producer.core, SessionId(3), "pd-1/engine")
    for number in (0, 1):
        pinned = another.pin(number)
        assert isinstance(pinned, wire.Pinned)
        another.send(wire.Unpin(seq=5, pin_id=pinned.pin_id))
    assert metrics_of(consumer) == expected | {
        ("other", "other", "cuda_ipc"): 1,
        ("other", "other", "pinned_shm"): 1,
    }


def metrics_of(client: Client) -> dict[tuple[str, ...], float]:
    reply = client.send(wire.MetricsQuery(seq=9))
    assert isinstance(reply, wire.StoreMetrics)
    return {
        tuple(sample.labels[name] for name in ("producer", "consumer", "transport")): sample.value
        for family in text_string_to_metric_families(reply.text)
        if family.name == "triptych_store_handed_over"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_the_slab_ends_with_its_store_and_redis_entries_stay() -> None:
    region = bytearray(LAYOUT.data_offset)
    client = with_slab(region)
    for number, memory in enumerate((SLAB.memory, "redis", "shm")):
        reserved = client.reserve(number, memory=memory)
        assert isinstance(reserved, wire.Reserved)
        client.send(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
        client.pin(number)
    core = core_on(region, LAYOUT, generation=2, is_alive=lambda slot: True, slab=SLAB)
    assert core.leases.num_pins == 2
    later = Client(core, ENGINE, "pd-0/engine")
    assert later.states()[:3] == "app"
    pinned = later.pin(1)
    assert isinstance(pinned, wire.Pinned)
    assert pinned.descriptor.memory == "redis"
