"""The region registered with NIXL, for one link and its thread.

Each end of a link has its own NIXL agent. The source's agent writes into reservations of the target and
notifies the target's agent with each write. To keep late writes out of reused blocks, the target ends its
agent before it gives back blocks that may still be written (docs/design/fabric.md explains why the source
writes).

NIXL's own progress thread is off: it costs an idle process a quarter of a core. Where the network cannot
write remote memory by itself, `take_notes` writes what has come.
"""

import ctypes
import gc
import logging
import uuid
from typing import Any

from triptych_cache_store.fabric.wire.channel import ChannelError
from triptych_common.region.mapping import RegionMapping

BACKEND, HOST_MEMORY = "UCX", "DRAM"


class NixlError(ChannelError):
    """NIXL failed; the link must be closed."""


def load_nixl() -> Any:
    """NIXL's API; the first call takes seconds. Raises NixlError if NIXL does not work on this machine."""
    try:
        from nixl import _api  # noqa: PLC0415 - an optional dependency, which has no other name for it
    except Exception as error:
        raise NixlError(f"NIXL cannot be loaded: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells each link on stdout
    return _api


class NixlWrite:
    """A NIXL write that was started."""

    def __init__(self, handle: Any, state: str) -> None:
        self.handle = handle
        self.state = state


class NixlMemory:
    """The region registered with NIXL: `open` registers it, `close` ends all NIXL operations."""

    def __init__(self, agent: Any, mapping: RegionMapping) -> None:
        self._agent = agent
        self._mapping = mapping
        self._target = ""

    @classmethod
    def open(cls, mapping: RegionMapping) -> "NixlMemory":
        """Register the region; raises NixlError."""
        api = load_nixl()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[BACKEND])
            agent = api.nixl_agent(uuid.uuid4().hex, config)
            agent.register_memory([(mapping.address, mapping.num_bytes, 0, "")], HOST_MEMORY)
        except Exception as error:  # NIXL's errors have no common class
            raise NixlError(f"NIXL cannot use the region: {error}") from error
        return cls(agent, mapping)

    def close(self) -> None:
        """End all NIXL reads and writes; handles of writes must be dropped before."""
        self._agent = None
        gc.collect()  # frees NIXL objects that an exception still holds

    # ---- at the target ---------------------------------------------------------------------------
    def metadata(self) -> bytes:
        """NIXL metadata that a source needs to write here."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def address_of(self, offset: int) -> int:
        """Address of the byte at `offset` of the region, for the source."""
        return self._mapping.address + offset

    def take_notes(self) -> list[bytes]:
        """Notifications of completed writes; raises NixlError."""
        try:
            notes = self._agent.get_new_notifs()
        except Exception as error:
            raise NixlError(f"NIXL failed: {error}") from error
        return [note for of_one in notes.values() for note in of_one]

    # ---- at the source ---------------------------------------------------------------------------
    def connect(self, metadata: bytes) -> None:
        """Connect to the target that sent `metadata`, after the handshake. Raises NixlError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(f"NIXL does not reach the target: {error}") from error
        self._target = name.decode() if isinstance(name, bytes) else str(name)

    def start_write(self, view: memoryview, address: int, note: bytes) -> NixlWrite:
        """Start writing `view`, part of the region, to the target's `address`. Raises NixlError."""
        own = ctypes.addressof(ctypes.c_char.from_buffer(view))
        try:
            local = self._agent.get_xfer_descs([(own, len(view), 0)], HOST_MEMORY)
            remote = self._agent.get_xfer_descs([(address, len(view), 0)], HOST_MEMORY)
            handle = self._agent.initialize_xfer("WRITE", local, remote, self._target, note)
            return NixlWrite(handle, self._agent.transfer(handle))
        except Exception as error:
            raise NixlError(f"NIXL cannot write to the target: {error}") from error

    def is_over(self, write: NixlWrite) -> bool:
        """True if the write is complete; raises NixlError if it failed, and the link with it."""
        try:
            if write.state == "PROC":
                write.state = self._agent.check_xfer_state(write.handle)
            if write.state == "DONE":
                self._agent.release_xfer_handle(write.handle)
        except Exception as error:
            raise NixlError(f"NIXL's write failed: {error}") from error
        if write.state not in ("PROC", "DONE"):
            raise NixlError(f"NIXL's write failed: {write.state}")
        return bool(write.state == "DONE")
