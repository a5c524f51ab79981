"""Run a service's main coroutine until it ends or a signal asks it to."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

OK_EXIT_CODE = 0
FAILED_EXIT_CODE = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Signal that is set once, when the service shall finish its work and return."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str) -> None:
        """Ask the service to end. Only the first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    async def wait(self) -> None:
        """Return once the service is asked to end."""
        await self._event.wait()


ServiceMain = Callable[[StopSignal], Awaitable[None]]


def run_service(main: ServiceMain) -> NoReturn:
    """Run `main` on an event loop of its own (uvloop's where installed), then exit the process.

    SIGINT and SIGTERM set the stop signal; a second one ends the process at once with 128 + signal.

    Raises:
        SystemExit: 0 when `main` returned, 1 when it raised (logged here).
    """
    raise SystemExit(_run(main))


def _run(main: ServiceMain) -> int:
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_done(main))
    except TriptychError as error:
        # An expected kind of failure: its text is enough.
        log.error("service failed", error=str(error), kind=type(error).__name__)  # noqa: TRY400
        return FAILED_EXIT_CODE
    except Exception:
        log.exception("service failed")
        return FAILED_EXIT_CODE
    return OK_EXIT_CODE


async def _until_done(main: ServiceMain) -> None:
    stop = StopSignal()
    with _signals_to(stop):
        await main(stop)


@contextmanager
def _signals_to(stop: StopSignal) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(received: signal.Signals) -> None:
        if stop.is_set:
            sys.stderr.flush()
            os._exit(128 + received)
        log.info("stop requested", signal=received.name)
        stop.set(received.name)

    for each in _SIGNALS:
        loop.add_signal_handler(each, on_signal, each)
    try:
        yield
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
