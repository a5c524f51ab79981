"""Whether a client reads its answer: what waits for it gets less, however slowly."""

from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from triptych_gateway.http_protocol import BoundedHttpProtocol, bounded_protocol
from triptych_gateway.settings import GatewaySettings

TIMEOUT_S = 60.0


class Connection:
    """A connection whose client takes bytes when told, on a clock that stands still."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.loop, self.transport = Mock(), Mock()
        self.transport.get_extra_info.return_value = None
        self.transport.get_write_buffer_size.side_effect = lambda: self.num_waiting
        made: type[BoundedHttpProtocol] = bounded_protocol(
            GatewaySettings(max_header_bytes=1024, chunk_timeout_s=TIMEOUT_S)
        )
        config = Config(Mock(), log_config=None, ws="none")
        self.protocol = made(config, ServerState(), {}, self.loop)
        self.protocol.connection_made(self.transport)
        self.loop.reset_mock()

    def let_time_pass(self) -> None:
        """The timer that was set last fires."""
        seconds, callback, *arguments = self._last_call()
        assert seconds == TIMEOUT_S
        callback(*arguments)

    def _last_call(self) -> tuple[Any, ...]:
        arguments: tuple[Any, ...] = self.loop.call_later.call_args.args
        return arguments


@pytest.fixture
def connection() -> Connection:
    return Connection()


async def test_a_slow_client_is_served_on_while_it_takes_anything(connection: Connection) -> None:
    connection.num_waiting = 100_000
    connection.protocol.pause_writing()
    for num_waiting in (99_999, 80_000, 70_000):
        connection.num_waiting = num_waiting
        connection.let_time_pass()
    assert connection.loop.call_later.call_count == 4
    connection.transport.abort.assert_not_called()

    connection.let_time_pass()  # and nothing is taken
    connection.transport.abort.assert_called_once_with()
    assert connection.loop.call_later.call_count == 4


def test_no_timer_stays_when_the_client_has_read_on(connection: Connection) -> None:
    connection.num_waiting = 100_000
    connection.protocol.pause_writing()
    connection.num_waiting = 50_000
    connection.let_time_pass()
    timer = connection.loop.call_later.return_value
    timer.cancel.assert_not_called()
    connection.protocol.resume_writing()
    timer.cancel.assert_called_once_with()
    connection.transport.abort.assert_not_called()
