"""Opens channels to other agents: a TCP connection to the agent's port, or two Redis streams and a call."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.redis_links import RedisLinks, close_in_thread, open_in_thread
from triptych_cache_store.fabric.wire.tcp_channel import TcpChannel
from triptych_common.protocol.messages import FabricEndpoint, FabricTransport
from triptych_common.protocol.transfers import LinkCall

PublishCall = Callable[[str, LinkCall], Awaitable[object]]
"""Publishes a `LinkCall` to the agent with this name; raises BusUnavailableError."""


class LinkDialer:
    """Opens channels; used in one event loop."""

    def __init__(self, own_store: str, redis_links: RedisLinks, publish_call: PublishCall) -> None:
        self._own_store = own_store
        self._redis_links = redis_links
        self._publish_call = publish_call

    async def dial(
        self, instance: str, endpoint: FabricEndpoint, transport: FabricTransport
    ) -> FabricChannel:
        """Open a channel to the agent `instance`; the handshake comes next.

        Raises:
            ChannelError
            OSError
            BusUnavailableError
        """
        if transport is not FabricTransport.REDIS:
            return TcpChannel(await _connect(endpoint))
        link_id = secrets.token_hex(16)
        channel = await open_in_thread(partial(self._redis_links.create, link_id))
        try:
            await self._publish_call(instance, LinkCall(link_id=link_id, source=self._own_store))
        except BaseException:
            close_in_thread(channel)
            raise
        return channel


async def _connect(endpoint: FabricEndpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    if endpoint.host is None or endpoint.port is None:
        raise OSError("it has no address")
    error: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            return sock
        except OSError as refused:
            sock.close()
            error = refused
        except BaseException:
            sock.close()
            raise
    raise error or OSError("it has no address")
