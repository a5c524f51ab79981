"""The item table under any order of events: single flight, no request forgotten, nothing left behind."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.examples import examples
from tests.support.item_records import item_record
from triptych_common.protocol.ids import JobId, MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.encode.item_table import ItemFailure, ItemState, ItemTable
from triptych_gateway.encode.sizes import ItemSizes

ITEMS = st.sampled_from([MmHash("a" * 64), MmHash("b" * 64)])
REQUESTS = st.sampled_from([RequestId(f"r{index}") for index in range(3)])
SIZES = ItemSizes(num_embeds=1, record=item_record(1))
BROKEN = ItemFailure(FailureKind.ENCODER_ERROR, "x")


class ItemTableMachine(RuleBasedStateMachine):
    """Events of encoders may be late, repeated, or of jobs long gone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ItemTable()
        self.waiting: set[tuple[MmHash, RequestId]] = set()
        self.jobs: dict[JobId, MmHash] = {}
        self.in_flight: dict[MmHash, JobId] = {}

    def requests_of(self, mm_hash: MmHash) -> frozenset[RequestId]:
        return frozenset(request for item, request in self.waiting if item == mm_hash)

    @rule(mm_hash=ITEMS, request=REQUESTS)
    def join(self, mm_hash: MmHash, request: RequestId) -> None:
        self.table.join_item(mm_hash, request)
        self.waiting.add((mm_hash, request))

    @rule(mm_hash=ITEMS, request=REQUESTS)
    def leave(self, mm_hash: MmHash, request: RequestId) -> None:
        self.table.leave_item(mm_hash, request)
        self.waiting.discard((mm_hash, request))
        if not self.requests_of(mm_hash):
            self.in_flight.pop(mm_hash, None)

    @rule(mm_hash=ITEMS)
    def recall(self, mm_hash: MmHash) -> None:
        self.table.recall_sizes(mm_hash, SIZES)

    @rule(mm_hash=ITEMS)
    def order(self, mm_hash: MmHash) -> None:
        job_id = JobId(f"j{len(self.jobs)}")
        must_publish = self.table.order_item(mm_hash, job_id)
        assert must_publish == (bool(self.requests_of(mm_hash)) and mm_hash not in self.in_flight)
        if must_publish:
            self.jobs[job_id] = mm_hash
            self.in_flight[mm_hash] = job_id

    @rule(mm_hash=ITEMS, sealed=st.booleans())
    def metadata(self, mm_hash: MmHash, sealed: bool) -> None:
        assert self.table.set_sizes(mm_hash, SIZES, sealed=sealed) == self.requests_of(mm_hash)
        if sealed:
            self.in_flight.pop(mm_hash, None)

    @rule(mm_hash=ITEMS)
    def completed(self, mm_hash: MmHash) -> None:
        assert self.table.seal_item(mm_hash) == self.requests_of(mm_hash)
        self.in_flight.pop(mm_hash, None)

    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        if not self.jobs:
            return
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        mm_hash = self.jobs[job_id]
        is_current = self.in_flight.get(mm_hash) == job_id
        requests = self.table.fail_job(mm_hash, job_id, BROKEN)
        assert requests == (self.requests_of(mm_hash) if is_current else frozenset())
        if is_current:
            del self.in_flight[mm_hash]

    @invariant()
    def one_job_per_item(self) -> None:
        assert {item.mm_hash: item.job_id for item in self.table if item.in_flight} == self.in_flight

    @invariant()
    def no_request_is_forgotten_and_nothing_is_left(self) -> None:
        assert {
            (item.mm_hash, request) for item in self.table for request in item.request_ids
        } == self.waiting
        assert all(item.request_ids for item in self.table)

    @invariant()
    def states_match_what_is_known(self) -> None:
        for item in self.table:
            if item.state in (ItemState.SIZED, ItemState.SEALED):
                assert item.sizes is not None
            if item.state in (ItemState.SEALED, ItemState.FAILED):
                assert not item.in_flight


TestItemTable = ItemTableMachine.TestCase
TestItemTable.settings = settings(max_examples=examples(60), stateful_step_count=30)
