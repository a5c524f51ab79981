"""Run a service's main coroutine until it ends or a signal asks it to."""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

OK_EXIT_CODE = 0
FAILED_EXIT_CODE = 1
END_LIMIT_S = 20.0  # of a process that has failed
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Signal that asks the service to finish and return; `fail` records a failure, and sets no signal."""

    def __init__(self, end_limit_s: float | None = None) -> None:
        """`end_limit_s`: seconds after a failure in which this process ends. None: no limit."""
        self._event = asyncio.Event()
        self._end_limit_s = end_limit_s
        self._has_failed = False
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
        await self._event.wait()

    def fail(self, error: Exception) -> None:
        """Log the failure that is being handled at once, and limit the rest of this process's life.

        What ends in order may wait for what has failed, as for an engine that hangs. At the limit the stacks
        of all threads are written to stderr, by a thread that needs no interpreter, and the process exits 1.
        Only the first failure counts.
        """
        if self._has_failed:
            return
        self._has_failed = True
        if isinstance(error, TriptychError):  # an expected kind of failure: its text is enough
            log.error("service failed", error=str(error), kind=type(error).__name__)
        else:
            log.exception("service failed")  # noqa: LOG004 -- called while the error is handled
        if self._end_limit_s is not None:
            faulthandler.dump_traceback_later(self._end_limit_s, exit=True)

    async def watch(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run `work(*args)`, and report its failure by `fail` before others that run beside it are ended.

        A task of this that is cancelled before its first step has begun nothing that must be awaited.
        """
        try:
            await work(*args)
        except Exception as error:
            self.fail(error)
            raise


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
            is_failed = runner.run(_until_done(main))
    except Exception:
        log.exception("service failed")
        return FAILED_EXIT_CODE
    return FAILED_EXIT_CODE if is_failed else OK_EXIT_CODE


async def _until_done(main: ServiceMain) -> bool:
    stop = StopSignal(END_LIMIT_S)
    with _signals_to(stop):
        try:
            await main(stop)
        except Exception as error:
            stop.fail(error)
            return True
    return False


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


def first_failure(failures: BaseException) -> BaseException:
    """Return the first failure in a group, which may be one of groups."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures
