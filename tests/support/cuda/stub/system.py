"""A store and both roles around it; reserves, pins and plans, as the hosts and EngineCore do."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tests.support.cuda.stub.handles import RoleHandle
from tests.support.cuda.stub.roles import ENCODER, PREFILL_DECODE, ROW_BYTES, WIDTH, Written
from tests.support.stores import PushLog, StoreProcess
from triptych_common.protocol.store import (
    SHM,
    EntrySealed,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    TensorSpec,
    Unpin,
)
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.slab_probe import SlabProbeResult
from triptych_vllm_connector.step_orders import WriteOrder

WAIT_S = 60.0
POLL_S = 0.001
REGION, SLAB = "region", "slab"


@dataclass(frozen=True)
class PinnedItem:
    """A pinned entry, as a load order of `PrefillDecodeRole` has it."""

    mm_hash: str
    pin_id: int
    descriptor: dict[str, Any]


@dataclass(frozen=True)
class Passage:
    """Milliseconds of one item from worker to worker."""

    write_ms: float  # the encoder's call
    seal_ms: float  # from the end of the call until it could be pinned
    load_ms: float  # prefill_decode's call
    all_ms: float  # until the GPU has read it


class RoleMaker(Protocol):
    """Starts a role of a system."""

    def __call__(self, role: str, instance: str) -> RoleHandle: ...


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until another process or thread makes `condition` true. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WAIT_S} s: {what}")
        pause.wait(POLL_S)


class StubSystem:
    """One store, an encoder and a prefill_decode. `close` ends all three."""

    def __init__(self, store: StoreProcess, make_role: RoleMaker) -> None:
        """Start both roles at `store`, which runs."""
        self.store = store
        self._make_role = make_role
        self._num_items = 0
        self._closers: list[RoleHandle] = []
        try:
            self.encoder = self.start_role(ENCODER, "encoder-0")
            self.prefill_decode = self.start_role(PREFILL_DECODE, "pd-0")
            for role in self._closers:  # both start at once
                role.wait_started()
            self.connect()
        except BaseException:
            self.close()
            raise

    def start_role(self, role: str, instance: str) -> RoleHandle:
        """Start one; its `wait_started` is due."""
        handle = self._make_role(role, instance)
        self._closers.append(handle)
        return handle

    def connect(self) -> None:
        """Open the hosts' sessions, which is due again after each start of the store."""
        self._host: StoreSession = self.store.connect("encoder-0/host")
        self._pushes = PushLog()
        self._engine: StoreSession = self.store.connect("pd-0/engine", on_push=self._pushes)
        slab = self._host.welcome.slab
        self._slab_memory = None if slab is None else slab.memory

    def memory(self, kind: str) -> str:
        """Return the memory that orders name: that of the region, or the slab's. Raises RuntimeError."""
        if kind == REGION:
            return SHM
        if self._slab_memory is None:
            raise RuntimeError(f"the store has no slab: {self.store.log()[-800:]}")
        return self._slab_memory

    def reserve(self, kind: str, rows: int, writer: str = "encoder-0") -> WriteOrder:
        """Get a place for a new item; waits while all are taken and none can be given again."""
        self._num_items += 1
        memory = self.memory(kind)
        spec = TensorSpec(dtype="bfloat16", shape=(rows, WIDTH), num_bytes=rows * ROW_BYTES)
        reserve = Reserve(
            seq=0, mm_hash=f"{self._num_items:064x}", spec=spec, writer=f"{writer}/worker-0", memory=memory
        )
        found: list[Reserved] = []

        def is_reserved() -> bool:
            reply = self._host.submit(reserve).result(WAIT_S)
            found.extend([reply] if isinstance(reply, Reserved) else [])
            return bool(found)

        wait_for(is_reserved, f"a place in {memory}")
        return WriteOrder(
            mm_hash=reserve.mm_hash,
            job_id=f"job-{self._num_items}",
            reservation_id=found[0].reservation_id,
            offset=found[0].offset,
            num_embeds=rows,
            width=WIDTH,
            dtype="bfloat16",
            generation=found[0].generation,
            memory=memory,
        )

    @property
    def seed(self) -> int:
        """Seed of the newest item's pattern."""
        return self._num_items

    def pin(self, mm_hash: str) -> PinnedItem:
        """Pin an item, once it is sealed."""
        reply = self._engine.submit(PinOrWatch(seq=0, mm_hash=mm_hash)).result(WAIT_S)
        # Not sealed yet: the store pins it when it is, and sends that. A second question would pin it twice.
        pinned = reply if isinstance(reply, Pinned) else self._pushes.wait_next(WAIT_S)
        assert isinstance(pinned, Pinned | EntrySealed), pinned
        assert pinned.descriptor.mm_hash == mm_hash, pinned
        return PinnedItem(mm_hash, pinned.pin_id, pinned.descriptor.model_dump(mode="json"))

    def unpin(self, pinned: PinnedItem) -> None:
        self._engine.request(Unpin(seq=0, pin_id=pinned.pin_id))

    def put(
        self, kind: str, rows: int, busy_ms: float = 0.0, encoder: RoleHandle | None = None
    ) -> WriteOrder:
        """Have an encoder write a new item; `encoder` is the system's own if not given."""
        order = self.reserve(kind, rows)
        (encoder or self.encoder).call("write", order=asdict(order), seed=self.seed, busy_ms=busy_ms)
        return order

    def step(self, *, load: PinnedItem | None = None, **arguments: Any) -> dict[str, Any]:
        """Launch a step of prefill_decode and return its `Stepped`; `collect` is due afterwards."""
        loads = [] if load is None else [asdict(load)]
        stepped: dict[str, Any] = self.prefill_decode.call("step", load=loads, **arguments)
        return stepped

    def pass_on(self, kind: str, rows: int, busy_ms: float = 0.0) -> Passage:
        """Pass one item from worker to worker, and wait for each. Raises AssertionError: it arrived wrong."""
        order = self.reserve(kind, rows)
        written = Written(**self.encoder.call("write", order=asdict(order), seed=self.seed, busy_ms=busy_ms))
        pinned = self.pin(order.mm_hash)
        pinned_s = time.perf_counter()
        stepped = self.step(load=pinned, gather=[(order.mm_hash, self.seed)])
        num_wrong = self.prefill_decode.call("collect")
        end_s = time.perf_counter()
        self.drop(order.mm_hash)
        assert not stepped["failed"], f"{rows} rows in {order.memory} were not loaded"
        assert num_wrong == 0, f"{num_wrong} of {rows * WIDTH} numbers in {order.memory} are wrong"
        return Passage(
            write_ms=(written.end_s - written.start_s) * 1e3,
            seal_ms=(pinned_s - written.end_s) * 1e3,
            load_ms=stepped["load_ms"],
            all_ms=(end_s - written.start_s) * 1e3,
        )

    def drop(self, *mm_hashes: str) -> None:
        """Run a step that drops items, and wait for it."""
        self.step(drop=mm_hashes)
        self.prefill_decode.call("collect")

    def wait_unpinned(self) -> None:
        wait_for(lambda: self.store.stats().num_pins == 0, "all pins end")

    def probe_failures(self) -> list[str]:
        """Reasons why roles cannot use the slab of the store as it is now; empty: both can."""
        probes = [SlabProbeResult(**role.call("probe")) for role in (self.encoder, self.prefill_decode)]
        generation = self._host.welcome.generation  # of a role that has yet to come back it is an earlier one
        return [
            each.failure or f"generation {each.generation}"
            for each in probes
            if each.usable_generation != generation
        ]

    def kill_store(self) -> None:
        """End the store's process without notice, and wait until it is gone."""
        self.store.stop(signal.SIGKILL)

    def restart_store(self) -> None:
        """Start the store again, and wait until hosts and roles are back at it."""
        self.store.start()
        self.connect()
        wait_for(lambda: self.probe_failures() == [], "both roles are back at the store")

    def close(self) -> None:
        for handle in self._closers:
            handle.close()
        self.store.close()
