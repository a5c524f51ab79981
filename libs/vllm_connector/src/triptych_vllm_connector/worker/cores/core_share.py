"""A worker's threads, and the cores on which they run now.

How many threads compute a step follows from the step alone, so results do not depend on the load: decoding
has a thread for each core that the engine owns, encoding and prompts have the whole team. oneDNN keeps for
each shape the number of threads that it first saw, so a number that changed with the load would be ignored
anyway. What follows the load is where they run: at the start of a step, and before each layer of a vision
tower, the worker reads from the host's board what the other engines do, and moves the team.

    others busy: all threads on the engine's own cores        others idle: on theirs too

Libraries work against both: oneDNN and MKL open teams of fewer threads, upon which the runtime ends the
others and starts new ones later, and torch sets MKL's number at the first operation of a thread.
"""

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from triptych_common.cores.board import CoreBoard, CoreBoardError, board_path
from triptych_common.cores.plan import CorePolicy, shared_cores, team_size
from triptych_common.cores.sharing import Work, cores_for
from triptych_common.cores.usable import core_quota, nice_stays_inside, num_usable_cores, usable_cores
from triptych_common.protocol.messages import Compute, Sharing
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores.compute_share import CoreRange

log = get_logger(__name__)

_RUNTIMES = re.compile(r"lib(?:gomp|iomp5|omp)")
_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
COMPUTE_NICE = 5  # a third of the weight of the host's threads
LOWEST_PRIORITY = 19  # Linux's


class OpenMp:
    """The OpenMP runtime of this process, called directly; numbers hold for the calling thread.

    vLLM replaces `torch.set_num_threads`, which also drops oneDNN's caches; the runtime's own function takes
    a microsecond. A team of one leaves the runtime's other threads asleep until the next team needs them.
    """

    def __init__(self, library: Any) -> None:
        """`library` has OpenMP's functions and `GOMP_parallel`, as Intel's and LLVM's runtimes have."""
        self._library = library
        self._library.GOMP_parallel.argtypes = [_REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

    @classmethod
    def of_process(cls) -> "OpenMp | None":
        """The preloaded runtime (as vLLM starts its workers), else the only one loaded.

        None if no runtime is loaded, or several are: no number would hold for all of them.
        """
        everything = ctypes.CDLL(None)
        if hasattr(everything, "GOMP_parallel"):
            return cls(everything)
        paths = {
            os.path.realpath(path)
            for line in Path("/proc/self/maps").read_text().splitlines()
            if _RUNTIMES.match(name := (path := line.split(maxsplit=5)[-1]).rpartition("/")[2])
            and ".so" in name
        }
        return cls(ctypes.CDLL(paths.pop())) if len(paths) == 1 else None

    def num_threads(self) -> int:
        """Number of threads of the teams that the calling thread starts."""
        return int(self._library.omp_get_max_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """Set the size of the teams that the calling thread starts from now on."""
        self._library.omp_set_num_threads(num_threads)

    def team(self, num_threads: int) -> frozenset[int]:
        """Kernel ids of a team's threads, the caller's included; missing threads are started."""
        ids: set[int] = set()

        def region(_: object) -> None:
            ids.add(threading.get_native_id())

        self._library.GOMP_parallel(_REGION(region), None, num_threads, 0)
        return frozenset(ids)


def before_each_layer(model: nn.Module, action: Callable[[], None]) -> int:
    """Call `action` before each layer: each member of the model's lists of modules that holds others.

    Returns their number. `forward` is replaced rather than hooked, since modules that vLLM may compile do not
    call hooks. Layers within layers are left out.
    """
    layers: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            for layer in module:
                layers[id(layer)] = layer
                inside.update(id(each) for each in layer.modules())
    for layer in layers.values():
        layer.forward = _announced(layer.forward, action)
    return len(layers)


def _announced(forward: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        action()
        return forward(*args, **kwargs)

    return announced


def lower_thread(thread: int) -> None:
    """Lower a thread's priority by `COMPUTE_NICE` where that affects only the encoder's own threads.

    Args:
        thread: its id in the kernel; 0 is the calling one. Without privileges it cannot be raised again.

    The policy stays: a thread of `SCHED_BATCH` interrupts no program when it wakes. Each operation of a team,
    which sleeps and wakes thousands of times a second, would wait for the time slices of other programs.

    Raises:
        ProcessLookupError: the thread has ended.
    """
    if nice_stays_inside():
        lowered = os.getpriority(os.PRIO_PROCESS, thread) + COMPUTE_NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(lowered, LOWEST_PRIORITY))


class CoreShare:
    """Core share of one worker; every method is for the thread that runs vLLM's steps."""

    def __init__(
        self,
        policy: CorePolicy,
        own: Collection[int],
        host: Collection[int],
        board: CoreBoard,
        openmp: OpenMp,
        move: Callable[[int, Collection[int]], None] = os.sched_setaffinity,
        lower: Callable[[int], None] = lower_thread,
    ) -> None:
        """`own` are the engine's own cores, `host` all cores that it may use.

        `move` moves a thread (0: the calling one) to cores and raises OSError; `lower` lowers its priority.
        """
        self._policy = policy
        self._own = frozenset(own)
        self._host = frozenset(host)
        self._board = board
        self._openmp = openmp
        self._move = move
        self._lower = lower
        self._team_size = team_size(len(self._own), len(self._host))
        self._num_threads = self._team_size
        openmp.set_num_threads(self._num_threads)
        self._team_looked_up = self._num_threads
        self._team = openmp.team(self._num_threads)
        self._cores: frozenset[int] = frozenset()  # where the team was put; none: not known
        self._refused: frozenset[int] = frozenset()
        self._works = self._is_late = False
        self.compute = Compute(sharing=Sharing.CORES, policy=policy, cores=tuple(sorted(self._own)))
        self.range = CoreRange(len(self._own), len(self._own))

    @classmethod
    def open(cls, config: ConnectorConfig, num_ranks: int) -> "CoreShare | None":
        """Open the share; None if this worker keeps the threads it was started with."""
        usable = usable_cores()
        own = set(config.cores) & set(usable)
        # Busy on more cores than its quota covers, a cgroup is stopped whole until the quota's next period.
        host = shared_cores(own, usable[: num_usable_cores(len(usable), core_quota())])
        if config.core_policy == "split" or not own or team_size(len(own), len(host)) <= len(own):
            return None
        try:
            openmp = OpenMp.of_process()
            if openmp is None or openmp.num_threads() != len(config.cores) or num_ranks > 1:
                log.info("cores not shared", reason="ranks, threads that the user set, or an unknown OpenMP")
                return None
            with ExitStack() as opened:
                board = opened.enter_context(closing(CoreBoard.open(board_path(config.store_socket), own)))
                torch.get_num_threads()  # a thread's first call sets OpenMP's number to MKL's: now, not later
                share = cls(config.core_policy, own, host, board, openmp)
                opened.pop_all()
        except (CoreBoardError, OSError) as error:
            log.warning("cores not shared", reason=str(error))
            return None
        log.info("cores shared", policy=config.core_policy, own=sorted(own), host=sorted(host))
        return share

    def watch_layers(self, model: nn.Module) -> None:
        """Choose again before each layer of `model`. Encoder only.

        Under `text_first` the team runs at a lower priority than the threads of the encoder's host, with
        which it shares its cores: the next items are preprocessed while this one is encoded.
        """
        before_each_layer(model, self.start_layer)
        if self._policy == "text_first":
            self._look_up_team(self._team_looked_up)  # loading has ended threads, and started others
            for thread in self._team:  # later threads inherit the calling thread's priority
                with suppress(ProcessLookupError):
                    self._lower(thread)

    def start_step(self, work: Work, *, is_late: bool = False) -> None:
        """Start a step of `work`; with `is_late` it may use cores of encoders that encode, too."""
        self._works, self._is_late = True, is_late
        self._board.publish(work)
        num_threads = len(self._own) if work is Work.DECODE else self._team_size
        if num_threads != self._num_threads or num_threads != self._openmp.num_threads():
            self._resize(num_threads)
        num_cores = self._place()
        self.range = CoreRange(num_cores, num_cores)

    def start_layer(self) -> None:
        """Start the next layer; the neighbours' load may have changed."""
        if self._works:
            self.range.add(self._place())

    def end_step(self) -> None:
        """End the step; nothing is computed until the next one."""
        self._works = False
        self._board.publish(Work.IDLE)

    def close(self) -> None:
        self._board.close()

    def _resize(self, num_threads: int) -> None:
        """Set the team's size. One thread leaves the others asleep; otherwise the runtime ends the rest."""
        self._openmp.set_num_threads(num_threads)
        self._num_threads = num_threads
        if num_threads > 1 and num_threads != self._team_looked_up:
            self._look_up_team(num_threads)

    def _look_up_team(self, num_threads: int) -> None:
        self._team_looked_up = num_threads
        self._team = self._openmp.team(num_threads)
        self._cores = frozenset()  # threads that were started between two moves are where their starter was

    def _place(self) -> int:
        """Put the team where it may run now; returns the number of cores."""
        cores = self._choose()
        if cores != self._cores:
            try:
                self._move_team(cores)
            except OSError as error:  # a cpuset was made smaller: the kernel has moved the threads itself
                self._cores = frozenset()
                if cores != self._refused:
                    self._refused = cores
                    log.warning("cores not available", cores=sorted(cores), error=str(error))
            else:
                self._cores = cores
        return len(cores)

    def _choose(self) -> frozenset[int]:
        if self._policy == "split":
            return self._own
        try:
            others = self._board.others()
        except OSError as error:
            log.warning("cores no longer shared", reason=str(error))
            self._policy = "split"
            return self._own
        return cores_for(
            self._policy, self._own, self._host, others, time.monotonic_ns(), is_late=self._is_late
        )

    def _move_team(self, cores: frozenset[int]) -> None:
        """Move the team, the calling thread first: the runtime starts new threads where it runs."""
        self._move(0, cores)
        try:
            self._move_others(cores)
        except ProcessLookupError:  # an operation had a smaller team: the runtime ended the threads beyond it
            self._look_up_team(self._team_looked_up)
            self._move_others(cores)

    def _move_others(self, cores: frozenset[int]) -> None:
        for thread in self._team:
            self._move(thread, cores)
