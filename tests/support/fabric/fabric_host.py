"""A store with its fabric agent, and a session beside them that encodes or consumes."""

import asyncio
import importlib.util
import json
import signal
from pathlib import Path

from tests.support.fabric.agent_process import FabricProcess
from tests.support.leftovers import store_leftovers
from tests.support.stores import PushLog, StoreProcess
from tests.support.waiting import until_async, wait_until
from triptych_common.protocol.store import (
    Cancel,
    EntrySealed,
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StoreReply,
    TensorSpec,
    Unpin,
    Watching,
)
from triptych_common.region.mapping import RegionMapping
from triptych_common.store_session import StoreSession

HAS_NIXL = importlib.util.find_spec("nixl") is not None
UCX_BETWEEN_HOSTS = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""Environment of agents on hosts of their own: not by this machine's memory, which hosts do not share."""


def transports_option(*transports: str) -> str:
    """Return an agent's option with the transports that it takes, the best first."""
    return f"--fabric-transports={json.dumps(transports)}"


def spec_of(num_bytes: int) -> TensorSpec:
    """Of any even number of bytes; for 1 byte there is no tensor, 2 is the least."""
    return TensorSpec(shape=(1, num_bytes // 2), dtype="bfloat16", num_bytes=num_bytes)


class FabricHost:
    """One "host" of a test. `close` ends all of it."""

    def __init__(
        self,
        run_dir: Path,
        redis_url: str,
        name: str,
        port: int,
        *options: str,
        region_bytes: int = 64 << 20,
        store_options: tuple[str, ...] = (),
    ) -> None:
        run_dir.mkdir(mode=0o700)
        self.name = name
        self.port = port
        self.store = StoreProcess(
            run_dir, f"--instance=store-{name}", *store_options, region_bytes=region_bytes
        )
        self.agent = FabricProcess(run_dir, redis_url, f"fabric-{name}", *options, port=port)
        self.pushes = PushLog()
        self._session: StoreSession | None = None
        self._mapping: RegionMapping | None = None

    @property
    def store_name(self) -> str:
        return f"store-{self.name}"

    def start(self) -> None:
        self.store.start()
        self.agent.start()

    @property
    def session(self) -> StoreSession:
        if self._session is None:
            self._session = self.store.connect("tester", on_push=self.pushes, reconnect_timeout_s=20.0)
        return self._session

    @property
    def mapping(self) -> RegionMapping:
        if self._mapping is None:
            welcome = self.session.welcome
            self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes, populate=False)
        return self._mapping

    # ---- as an encoder ---------------------------------------------------------------------------
    def reserve(self, mm_hash: str, num_bytes: int) -> Reserved:
        reply = self.session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec_of(num_bytes)))
        assert isinstance(reply, Reserved), reply
        return reply

    def seal(self, reserved: Reserved, data: bytes) -> None:
        self.mapping.view(reserved.offset, len(data))[:] = data
        self.session.request(Seal(seq=0, reservation_id=reserved.reservation_id))

    def encode(self, mm_hash: str, data: bytes) -> None:
        self.seal(self.reserve(mm_hash, len(data)), data)

    def cancel(self, reserved: Reserved) -> None:
        self.session.request(Cancel(seq=0, reservation_id=reserved.reservation_id))

    # ---- as a consumer ---------------------------------------------------------------------------
    def pin_or_watch(self, mm_hash: str) -> StoreReply:
        return self.session.request(PinOrWatch(seq=0, mm_hash=mm_hash))

    def read(self, mm_hash: str) -> bytes:
        """The bytes of a sealed entry."""
        pinned = self.pin_or_watch(mm_hash)
        assert isinstance(pinned, Pinned), pinned
        return self._taken(pinned)

    def wait_sealed(self, mm_hash: str, timeout_s: float = 20.0) -> bytes:
        """The bytes of an entry that `pin_or_watch` did not find sealed."""
        push = self.pushes.wait_next(timeout_s)
        assert isinstance(push, EntrySealed), push
        assert push.descriptor.mm_hash == mm_hash
        return self._taken(push)

    def is_being_written(self, mm_hash: str) -> bool:
        reply = self.pin_or_watch(mm_hash)
        return isinstance(reply, Watching) and reply.writing

    async def wait_being_written(self, mm_hash: str, timeout_s: float = 15.0) -> None:
        await until_async(lambda: asyncio.to_thread(self.is_being_written, mm_hash), timeout_s)

    def wait_no_leftovers(self, timeout_s: float = 15.0) -> None:
        """Nothing is reserved, pinned or watched."""
        wait_until(
            lambda: not any(store_leftovers(self.store.stats()).values()),
            timeout_s,
            f"nothing is held at {self.store_name}",
        )

    def reset(self) -> None:
        """As after the start: no session of the test, no entries."""
        if self._mapping is not None:
            self._mapping.close()
        if self._session is not None:
            self._session.close()
        self._mapping = self._session = None
        self.pushes = PushLog()
        self.session.request(Evict(seq=0))

    def kill_agent(self) -> None:
        self.agent.stop(signal.SIGKILL)

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        self.agent.close()
        self.store.close()

    def _taken(self, pinned: Pinned | EntrySealed) -> bytes:
        descriptor = pinned.descriptor
        data = bytes(self.mapping.view(descriptor.offset, descriptor.spec.num_bytes))
        self.session.request(Unpin(seq=0, pin_id=pinned.pin_id))
        return data
