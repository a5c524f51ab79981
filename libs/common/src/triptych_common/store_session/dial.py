"""Connect to the store's socket and send hello, blocking. For sessions with a thread of their own."""

import socket
import time
from typing import TypeVar

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.store_session.resumption import Request
from triptych_common.store_session.session_state import SessionState, disconnected

Pending = TypeVar("Pending")
READ_BYTES = 1 << 16
FIRST_RETRY_S = 0.01
LAST_RETRY_S = 0.5


def dial(
    path: str, state: SessionState[Pending], timeout_s: float
) -> tuple[socket.socket, list[Request[Pending]]]:
    """Return a non-blocking socket that the store has welcomed, and the requests to send again first.

    Raises:
        StoreUnavailableError: no store there, no answer in time, or (code lease_lost) another region.
        StoreError: the store refuses this client.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(state.begin_connection())
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            data = connection.recv(READ_BYTES)
            if not data:
                raise disconnected("the store closed the session at hello")
            repeats = state.on_welcome(data)
            if repeats is not None:
                connection.setblocking(False)
                return connection, repeats
    except OSError as error:
        connection.close()
        raise StoreUnavailableError(f"cannot connect to the store: {error}") from error
    except BaseException:
        connection.close()
        raise
