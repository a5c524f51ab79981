"""What a test does to a system: kill, stop and slow down, at once or when a point is reached."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tests.support.fast.processes import points
from tests.support.fast.system import FastSystem
from tests.support.faults.slowing import in_short_turns

REDIS = "redis"

Act = Callable[[str], None]  # gets the instance that reached the point


class Faults:
    """Does things to the processes of `system`. Redis is one of the victims, called `redis`."""

    def __init__(self, system: FastSystem) -> None:
        self._system = system
        self._control = _Control(system.folder)

    def close(self) -> None:
        self._control.close()

    def kill(self, victim: str) -> None:
        """kill -9, and wait for its end. The system restarts a service; Redis at once, without its data."""
        if victim == REDIS:
            self._system.redis.stop()
            self._system.redis.start()
        else:
            self._system.services[victim].kill()

    def stop(self, victim: str) -> None:
        """SIGSTOP: it keeps its connections and answers nothing, until `go_on`."""
        if victim == REDIS:
            self._system.redis.freeze()
        else:
            self._system.services[victim].send(signal.SIGSTOP)

    def go_on(self, victim: str) -> None:
        if victim == REDIS:
            self._system.redis.thaw()
        else:
            self._system.services[victim].send(signal.SIGCONT)

    def slowed(self, victim: str) -> AbstractContextManager[None]:
        """It gets a small part of the time, until the block ends."""
        return in_short_turns(partial(self.stop, victim), partial(self.go_on, victim))

    @contextmanager
    def at(self, step: str, moment: str, act: Act) -> Iterator[threading.Event]:
        """The first process that reaches the point stands still while `act` runs. Set when it came to it.

        When the block has ended nothing is done any more. What `act` raises is raised then.
        """
        point = points.point_name(step, moment)
        with self._control.armed(point, act) as reached:
            yield reached


class _Control:
    """The test's end of the fault points."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._acts: dict[str, tuple[Act, threading.Event]] = {}
        self._acting = threading.Lock()  # held while an act is done, and to forbid further ones
        self._failure: Exception | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / points.CONTROL_SOCKET))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, name="fault points", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)

    @contextmanager
    def armed(self, point: str, act: Act) -> Iterator[threading.Event]:
        reached = threading.Event()
        self._acts[point] = (act, reached)
        _arm(self._folder, point)
        try:
            yield reached
        finally:
            _disarm(self._folder, point)
            with self._acting:
                self._acts.pop(point, None)
                failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        instance, _, point = connection.makefile().readline().strip().partition(" ")
        with self._acting:
            act, reached = self._acts.get(point, (None, None))
            if act is not None and reached is not None:
                try:
                    act(instance)
                except Exception as error:
                    self._failure = error
                reached.set()
        with contextlib.suppress(OSError):  # killed while it stood there
            connection.sendall(b"!")


def _arm(folder: Path, point: str) -> None:
    """The next process that reaches `point` stops there."""
    handle = os.open(folder / point, os.O_CREAT | os.O_EXCL, 0o600)
    os.close(handle)


def _disarm(folder: Path, point: str) -> bool:
    """Whether it was still armed: no process has reached it."""
    try:
        (folder / point).unlink()
    except FileNotFoundError:
        return False
    return True
