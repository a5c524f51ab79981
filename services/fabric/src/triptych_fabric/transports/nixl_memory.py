"""Adapter to NIXL's API: the region registered with NIXL, for one end of a link and its thread.

Each end of a link has its own NIXL agent. The sender's agent writes into reservations of the receiver and
notifies the receiver's agent with each write. To keep late writes out of reused blocks, the receiver ends its
agent before it gives back blocks that may still be written (docs/design/fabric.md explains why the sender
writes).

NIXL's own progress thread is off: it costs an idle process a quarter of a core. Where the network cannot
write remote memory by itself, `take_notes` writes what has come.
"""

import ctypes
import gc
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triptych_common.region.mapping import RegionMapping
from triptych_fabric.wire.channel import ChannelError

BACKEND, HOST_MEMORY = "UCX", "DRAM"


class NixlError(ChannelError):
    """NIXL failed; the link must be closed."""


def load_nixl() -> Any:
    """NIXL's API; the first call takes seconds. Raises NixlError if NIXL does not work on this machine."""
    with _failing("cannot be loaded"):
        from nixl import _api  # noqa: PLC0415 - an optional dependency, which has no other name for it
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs each link on stdout
    return _api


class NixlWrite:
    def __init__(self, handle: Any, state: str) -> None:
        self.handle = handle
        self.state = state


class NixlMemory:
    """The region registered with NIXL: `open` registers it, `close` ends all NIXL operations."""

    def __init__(self, agent: Any, mapping: RegionMapping) -> None:
        self._agent = agent
        self._mapping = mapping
        self._receiver = ""

    @classmethod
    def open(cls, mapping: RegionMapping) -> "NixlMemory":
        """Register the region; raises NixlError."""
        api = load_nixl()
        with _failing("cannot use the region"):
            config = api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[BACKEND])
            agent = api.nixl_agent(uuid.uuid4().hex, config)
            agent.register_memory([(mapping.address, mapping.num_bytes, 0, "")], HOST_MEMORY)
        return cls(agent, mapping)

    def close(self) -> None:
        """End all NIXL reads and writes; handles of writes must be dropped before."""
        self._agent = None
        gc.collect()  # frees NIXL objects that an exception still holds

    # ---- at the receiver -------------------------------------------------------------------------
    def metadata(self) -> bytes:
        """NIXL metadata that a sender needs to write here."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def address_of(self, offset: int) -> int:
        """Address of the byte at `offset` of the region, for the sender."""
        return self._mapping.address + offset

    def take_notes(self) -> list[bytes]:
        """Notifications of completed writes; raises NixlError."""
        with _failing("failed"):
            notes = self._agent.get_new_notifs()
        return [note for of_one in notes.values() for note in of_one]

    # ---- at the sender ---------------------------------------------------------------------------
    def connect(self, metadata: bytes) -> None:
        """Connect to the receiver that sent `metadata`, after the handshake. Raises NixlError."""
        with _failing("does not reach the receiver"):
            name = self._agent.add_remote_agent(metadata)
        self._receiver = name.decode() if isinstance(name, bytes) else str(name)

    def start_write(self, view: memoryview, address: int, note: bytes) -> NixlWrite:
        """Start writing `view`, part of the region, to the receiver's `address`. Raises NixlError."""
        own = ctypes.addressof(ctypes.c_char.from_buffer(view))
        with _failing("cannot write to the receiver"):
            local = self._agent.get_xfer_descs([(own, len(view), 0)], HOST_MEMORY)
            remote = self._agent.get_xfer_descs([(address, len(view), 0)], HOST_MEMORY)
            handle = self._agent.initialize_xfer("WRITE", local, remote, self._receiver, note)
            return NixlWrite(handle, self._agent.transfer(handle))

    def is_over(self, write: NixlWrite) -> bool:
        """True if the write is complete; raises NixlError if it failed, and the link with it."""
        with _failing("failed to write"):
            if write.state == "PROC":
                write.state = self._agent.check_xfer_state(write.handle)
            if write.state == "DONE":
                self._agent.release_xfer_handle(write.handle)
        if write.state not in ("PROC", "DONE"):
            raise NixlError(f"NIXL failed to write: {write.state}")
        return bool(write.state == "DONE")


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn errors of NIXL, which have no common class, into NixlError."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"NIXL {what}: {error}") from error
