"""The system of a test: started, kept running, asked what it holds, ended."""

import contextlib
import multiprocessing.connection
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import httpx
import redis

from tests.support.fast.layout import LOOPBACK, Layout, port_to_listen_at
from tests.support.fast.processes.forkserver import ServiceProcess
from tests.support.fast.processes.machine import HERE, Machine
from tests.support.fast.processes.points import SEEN
from tests.support.fast.processes.tally import Tally
from tests.support.fast.redis_inspection import RedisServer, registered_boots, stream_leftovers
from tests.support.leftovers import store_leftovers
from tests.support.protocol_steps import Party
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import Evict, StatsQuery, StoreCommand, StoreStats
from triptych_common.store_session import StoreSession

START_LIMIT_S = 60.0
IDLE_LIMIT_S = 40.0
RESTART_DELAY_S = 0.2
LOOK_S = 0.05
CASE_LINES = 60
WITHOUT_HTTP = (Party.CACHE_STORE, Party.ENCODER, Party.SOURCE_AGENT)


class FastSystem:
    """See the package's docstring. Processes that end are started again, unless they are held down."""

    def __init__(self, redis_server: RedisServer, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.redis = redis_server
        base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="triptych-fast-", dir=base))
        self._tally = self.folder / "encodes"
        self._tally.touch()
        (self.folder / SEEN).mkdir()
        self.restarts: Counter[str] = Counter()
        self.exits: list[tuple[str, int | None]] = []
        self._ports: dict[str, int] = {}
        self._held_down: set[str] = set()
        self._dead_boots: set[str] = set()  # registered by processes that have ended
        self._ending = threading.Event()
        self._lock = threading.RLock()
        self._wake_receiver, self._wake_sender = multiprocessing.Pipe(duplex=False)
        self.services = self._make_services()
        self._keeper = threading.Thread(target=self._keep_running, name="keeper", daemon=True)

    # ---- life ------------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when a gateway would serve, and every service is registered.

        Raises:
            RuntimeError: not in time; with the logs.
        """
        for store in self.stores:
            self.services[store].start()
        self.wait_until(self._stores_answer, START_LIMIT_S, "every store answers")
        for service in self.services.values():
            if service.party is not Party.CACHE_STORE:
                service.start()
        self._keeper.start()
        self.wait_until_whole()

    def close(self) -> None:
        """End everything; the last logs stay readable until then."""
        with self._lock:
            self._ending.set()
        self._wake_sender.send_bytes(b"x")
        if self._keeper.is_alive():
            self._keeper.join(10.0)
        stores = [each for each in self.services.values() if each.party is Party.CACHE_STORE]
        others = [each for each in self.services.values() if each not in stores]
        for ending in (others, stores):
            with ThreadPoolExecutor(len(ending)) as pool:
                list(pool.map(ServiceProcess.end, ending))
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def names_of(self, party: Party) -> list[str]:
        return [service.name for service in self.services.values() if service.party is party]

    def hold_down(self, name: str) -> None:
        """When it ends it stays away, until `let_up`."""
        with self._lock:
            self._held_down.add(name)

    def let_up(self, name: str) -> None:
        with self._lock:
            self._held_down.discard(name)
            if self.services[name].exit_code is not None:
                self._start_again(self.services[name])
        self._wake_sender.send_bytes(b"x")

    # ---- where it is -----------------------------------------------------------------------------
    @property
    def stores(self) -> list[str]:
        return self.names_of(Party.CACHE_STORE)

    def run_dir_of(self, name: str) -> Path:
        """Of an instance."""
        return self.folder

    def url(self, name: str = "gateway-0") -> str:
        return f"http://{self._address_of(name)}:{self._ports[name]}"

    def log(self, name: str) -> str:
        path = self.services[name].log_path
        return path.read_text(errors="replace") if path.exists() else ""

    def log_marks(self) -> dict[str, int]:
        """How long each log is now, by name."""
        paths = {name: service.log_path for name, service in self.services.items()}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def logs_since(self, marks: Mapping[str, int]) -> str:
        """What each process has written since then; of long ones the end."""
        parts = []
        for name, service in self.services.items():
            raw = service.log_path.read_bytes() if service.log_path.exists() else b""
            lines = raw[marks[name] :].decode(errors="replace").splitlines()
            parts.append(f"---- {name}: the last {min(len(lines), CASE_LINES)} lines of {len(lines)}")
            parts += lines[-CASE_LINES:]
        return "\n".join(parts)

    # ---- what it holds ---------------------------------------------------------------------------
    def store_stats(self, store: str | None = None) -> StoreStats:
        """Of the only one, or of `store`."""
        stats = self._ask_store(store or self.stores[0], StatsQuery(seq=0))
        assert isinstance(stats, StoreStats)
        return stats

    def evict_all(self, *stores: str) -> None:
        """From all stores, or from `stores`."""
        for store in stores or self.stores:
            self._ask_store(store, Evict(seq=0))

    def leftovers(self) -> dict[str, int]:
        """What must not be there when nothing is asked; empty: nothing."""
        found: dict[str, int] = {}
        for store in self.stores:
            left = store_leftovers(self.store_stats(store))
            found |= {f"{store} {what}": number for what, number in left.items()}
        for name in self._engines():
            counts = self._get_json(name, "/status")
            counts.pop("steps", None)
            found |= {f"{name} {what}": number for what, number in counts.items()}
        for name in self.names_of(Party.GATEWAY):
            found[f"{name} requests"] = self._get_json(name, "/health/ready")["num_requests"]
        found |= stream_leftovers(self.redis.url)
        return {what: number for what, number in found.items() if number}

    def _engines(self) -> list[str]:
        """Instances of the language model, of all stages."""
        parties = (Party.PREFILL_DECODE, Party.PREFILL, Party.DECODE)
        return [name for party in parties for name in self.names_of(party)]

    def status_of(self, prefill_decode: str) -> dict[str, int]:
        """What its engine holds."""
        return dict(self._get_json(prefill_decode, "/status"))

    def wait_until_idle(self, allowed: Callable[[str], bool] = lambda what: False) -> None:
        """Nothing is left of any request.

        Args:
            allowed: names of `leftovers` that may stay.

        Raises:
            RuntimeError: something stays.
        """
        left: dict[str, int] = {}

        def is_idle() -> bool:
            try:
                found = self.leftovers()
            except (StoreError, httpx.HTTPError, redis.RedisError, OSError) as error:
                found = {repr(error): 1}
            left.clear()
            left.update({what: number for what, number in found.items() if not allowed(what)})
            return not left

        try:
            self.wait_until(is_idle, IDLE_LIMIT_S, "nothing is left over")
        except RuntimeError as error:
            raise RuntimeError(f"left over: {left}\n{error}") from None

    def wait_until_whole(self) -> None:
        """Every service runs, is registered and known to every gateway."""

        def is_whole() -> bool:
            with self._lock:
                if any(service.exit_code is not None for service in self.services.values()):
                    return False
            expected = {n for n in self.services if self.services[n].party is not Party.CACHE_STORE}
            try:
                for gateway in self.names_of(Party.GATEWAY):
                    report = self._get_json(gateway, "/health/ready")
                    if report["status"] != "ready":
                        return False
                    if {each["instance"] for each in report["instances"]} != expected:
                        return False
                for name in self._engines():
                    self._get_json(name, "/status")
                for store in self.stores:
                    self.store_stats(store)
                boots = registered_boots(self.redis.url, self.services)
            except (httpx.HTTPError, StoreError, OSError, redis.RedisError):
                return False
            return boots.keys() == expected and not self._dead_boots & set(boots.values())

        self.wait_until(is_whole, START_LIMIT_S, "every service runs and is registered")

    def seen_points(self) -> set[str]:
        """`step.moment` of everything that has happened so far."""
        return {path.name for path in (self.folder / SEEN).iterdir()}

    def tally(self) -> Tally:
        """Of all encodes so far."""
        return Tally.read(self._tally)

    def rss_bytes(self) -> dict[str, int]:
        return {name: service.rss_bytes() for name, service in self.services.items()}

    def wait_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """In other processes, which cannot be awaited here.

        Raises:
            RuntimeError: not in time; with the ends of the logs.
        """
        pause = threading.Event()
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {limit_s} s: {what}\n{self.log_ends()}")
            pause.wait(LOOK_S)

    def log_ends(self, num_lines: int = 12) -> str:
        parts = []
        for name in self.services:
            lines = self.log(name).splitlines()[-num_lines:]
            parts.append("\n".join([f"---- {name} (exit {self.services[name].exit_code})", *lines]))
        return "\n".join(parts)

    # ---- inside ----------------------------------------------------------------------------------
    def _make_services(self) -> dict[str, ServiceProcess]:
        services: dict[str, ServiceProcess] = {}
        for party, instances in self.layout.names().items():
            for name in instances:
                if party not in WITHOUT_HTTP:
                    self._ports[name] = port_to_listen_at()
                arguments = self.layout.arguments(
                    party, name,
                    redis_url=self._redis_url, folder=self.run_dir_of(name), tally=self._tally,
                    ports=self._ports,
                )  # fmt: skip
                arguments += self._placed(party, name)
                services[name] = ServiceProcess(party, name, arguments, self.folder, self._machine_of(name))
        return services

    @property
    def _redis_url(self) -> str:
        """For services."""
        return self.redis.url

    def _placed(self, party: Party, name: str) -> list[str]:
        """Options that say where an instance is; none: all is on this machine, with one store."""
        return []

    def _machine_of(self, name: str) -> Machine:
        return HERE

    def _address_of(self, name: str) -> str:
        """Where an instance listens."""
        return LOOPBACK

    def _ask_store(self, store: str, command: StoreCommand) -> object:
        socket = self.run_dir_of(store) / "store.sock"
        with closing(StoreSession.connect(socket, f"test-{time.monotonic_ns()}/{command.kind}")) as session:
            return session.request(command)

    def _keep_running(self) -> None:
        while True:
            with self._lock:
                if self._ending.is_set():
                    return
                watched = {
                    service.sentinel: service
                    for service in self.services.values()
                    if service.name not in self._held_down or service.exit_code is None
                }
            ready = multiprocessing.connection.wait([*watched, self._wake_receiver], timeout=1.0)
            if self._wake_receiver in ready:
                self._wake_receiver.recv_bytes()
            ended = [watched[each] for each in ready if isinstance(each, int)]
            if ended:
                threading.Event().wait(RESTART_DELAY_S)  # as a supervisor does, so that a death is seen
            with self._lock:
                for service in ended:
                    if self._ending.is_set() or service.exit_code is None:
                        continue
                    self.exits.append((service.name, service.exit_code))
                    if service.name not in self._held_down:
                        self._start_again(service)

    def _start_again(self, service: ServiceProcess) -> None:
        """Start a service that has ended; what is registered under its name now is the dead process."""
        with contextlib.suppress(redis.RedisError):
            self._dead_boots.update(registered_boots(self.redis.url, [service.name]).values())
        self.restarts[service.name] += 1
        service.start()

    def _stores_answer(self) -> bool:
        for store in self.stores:
            try:
                self.store_stats(store)
            except StoreError:
                if self.services[store].exit_code is not None:
                    raise RuntimeError(f"the store ended: {self.log(store)}") from None
                return False
        return True

    def _get_json(self, name: str, path: str) -> Any:
        answer = httpx.get(self.url(name) + path, timeout=5.0, trust_env=False)
        if answer.status_code not in (200, 503):
            raise httpx.HTTPError(f"{name} answered {answer.status_code} to {path}")
        return answer.json()
