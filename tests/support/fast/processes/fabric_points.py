"""Fault points between two fabric agents: frames of a connection, before they are sent and as they come."""

from typing import Any, cast

from tests.support.fast.processes.points import HANDLED, RECEIVED, SENDING, reach


def watch_fabric() -> None:
    """In an agent's process, before it starts."""
    from triptych_fabric.wire import connection, frames

    steps = {
        frames.FrameKind.OFFER: "offer",
        frames.FrameKind.ACCEPTED: "accept",
        frames.FrameKind.PRESENT: "accept",
        frames.FrameKind.CHUNK: "bytes",
        frames.FrameKind.STORED: "stored",
    }

    class WatchedSide:
        """A side of a connection."""

        def __init__(self, side: Any) -> None:
            self._side = side

        def __getattr__(self, name: str) -> Any:
            return getattr(self._side, name)

        def next_frame(self, now: float) -> Any:
            head, chunk, pause_s = self._side.next_frame(now)
            if head and (step := steps.get(head[0])) is not None:  # a header begins with its kind
                reach(step, SENDING)
            return head, chunk, pause_s

        def on_frame(self, header: Any, body: bytes) -> None:
            step = steps.get(header.kind)
            if step is not None:
                reach(step, RECEIVED)
            self._side.on_frame(header, body)
            if step is not None:
                reach(step, HANDLED)

    original = connection.FabricConnection.__init__

    def watched_init(self: Any, name: str, channel: Any, side: Any, *rest: Any, **more: Any) -> None:
        original(self, name, channel, cast(Any, WatchedSide(side)), *rest, **more)

    connection.FabricConnection.__init__ = watched_init  # type: ignore[method-assign]
