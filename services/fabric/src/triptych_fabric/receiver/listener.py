"""Accepts connections of other agents, up to a limit, and to a lower one before their handshake."""

import asyncio
import socket
from collections.abc import Callable

from triptych_common.runtime.listening import bind_tcp
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.receiver.peer import FabricPeer
from triptych_fabric.wire.channel import FabricChannel

log = get_logger(__name__)

MAX_PEERS = 128
MAX_HALF_OPEN = 32
BACKLOG = 64
PAUSE_S = 1.0  # after a failure: the connection stays in the backlog, so that accepting at once would spin
NewPeer = Callable[[FabricChannel, Callable[[FabricPeer], None]], FabricPeer]


class FabricListener:
    """Accepts connections in one event loop; `serve` starts it."""

    def __init__(self, new_peer: NewPeer) -> None:
        self._new_peer = new_peer
        self._accepting: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []
        self._peers: set[FabricPeer] = set()
        self._num_turned_away = 0

    @property
    def peers(self) -> tuple[FabricPeer, ...]:
        return tuple(self._peers)

    @property
    def num_peers(self) -> int:
        return sum(peer.sender is not None for peer in self._peers)

    def serve(self, host: str, port: int) -> None:
        """Listen; raises ListenError if the address is unusable."""
        self._sockets = bind_tcp(host, port)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
            self._accepting.append(asyncio.get_running_loop().create_task(self._accept(sock)))

    def close_peers(self) -> None:
        """Close all connections; peers may reconnect."""
        for peer in self._peers:
            peer.close()

    async def close(self, timeout_s: float) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        peers = list(self._peers)
        self.close_peers()
        if peers:
            await asyncio.wait([peer.closed for peer in peers], timeout=timeout_s)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
                self._take(sock)
            except ConnectionError:  # the peer is gone already
                continue
            except (OSError, RuntimeError) as error:  # no file, no memory, or no thread
                log.warning("fabric connections not accepted for a while", error=str(error))
                await asyncio.sleep(PAUSE_S)

    def _take(self, sock: socket.socket) -> None:
        """Serve a new connection, or close it if there are too many."""
        if not self._has_room():
            sock.close()
            return
        channel: FabricChannel | None = None
        try:
            channel = FabricChannel(sock)
            self._peers.add(self._new_peer(channel, self._peers.discard))
        except BaseException:
            (channel or sock).close()
            raise

    def _has_room(self) -> bool:
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
