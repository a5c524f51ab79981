"""Accepts connections of other agents, up to a limit, and to a lower one before their handshake."""

import asyncio
import errno
import socket
from collections.abc import Callable

from triptych_cache_store.fabric.target.peer import FabricPeer
from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.tcp_channel import TcpChannel
from triptych_common.runtime.listening import bind_tcp
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_PEERS = 128
MAX_HALF_OPEN = 32
BACKLOG = 64
PAUSE_S = 1.0
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NewPeer = Callable[[FabricChannel, Callable[[FabricPeer], None]], FabricPeer]


class FabricListener:
    """Accepts connections in one event loop; `serve` starts it."""

    def __init__(self, new_peer: NewPeer) -> None:
        self._new_peer = new_peer
        self._sockets: list[socket.socket] = []
        self._peers: set[FabricPeer] = set()
        self._num_turned_away = 0
        self._pausing: asyncio.TimerHandle | None = None

    @property
    def peers(self) -> tuple[FabricPeer, ...]:
        return tuple(self._peers)

    @property
    def num_peers(self) -> int:
        """Number of peers that completed the handshake."""
        return sum(peer.source is not None for peer in self._peers)

    def serve(self, host: str, port: int) -> None:
        """Listen; raises ListenError if the address is unusable."""
        loop = asyncio.get_running_loop()
        self._sockets = bind_tcp(host, port)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
            loop.add_reader(sock, self._accept, sock)

    def close_peers(self) -> None:
        """Close all connections; peers may reconnect."""
        for peer in self._peers:
            peer.close()

    async def close(self, timeout_s: float) -> None:
        self.stop_listening()
        peers = list(self._peers)
        self.close_peers()
        if peers:
            await asyncio.wait([peer.closed for peer in peers], timeout=timeout_s)

    def stop_listening(self) -> None:
        """Stop listening; repeated calls have no effect."""
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._sockets = []

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # it stays in the backlog: asked at once again, this would spin
                self._pause(error)
            return
        if not self.has_room():
            sock.close()
            return
        try:
            channel = TcpChannel(sock)
        except OSError as error:
            sock.close()
            self._pause(error)
        else:
            self.take(channel)

    def has_room(self) -> bool:
        """True if another connection may be accepted; a refusal is counted."""
        num_half_open = len(self._peers) - self.num_peers
        if len(self._peers) < MAX_PEERS and num_half_open < MAX_HALF_OPEN:
            return True
        self._num_turned_away += 1
        if self._num_turned_away & (self._num_turned_away - 1) == 0:  # 1st, 2nd, 4th, 8th …
            log.warning(
                "fabric connection turned away, there are too many",
                num_peers=len(self._peers),
                num_turned_away=self._num_turned_away,
            )
        return False

    def take(self, channel: FabricChannel) -> None:
        """Serve a new connection, or close it if the machine is out of resources."""
        try:
            self._peers.add(self._new_peer(channel, self._peers.discard))
        except (OSError, RuntimeError) as error:  # no file, or no thread
            channel.close()
            self._pause(error)
        except BaseException:
            channel.close()
            raise

    def _pause(self, error: Exception) -> None:
        """Pause accepting, because the machine is out of resources."""
        log.warning("fabric connections not accepted for a while", error=str(error))
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
        if self._pausing is None:
            self._pausing = loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pausing = None
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)
