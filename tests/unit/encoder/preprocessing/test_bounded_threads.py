"""Blocking work: bounded together, in time, and never silently stuck."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from triptych_encoder.encoding import EngineFailedError, PreprocessFailedError
from triptych_encoder.preprocessing import bounded_threads
from triptych_encoder.preprocessing.bounded_threads import BoundedThreads
from triptych_vllm_connector.decoding.processes import CORE_WAITS

LIMIT_S = 30.0


class Gate:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(LIMIT_S)
        return "done"


@pytest.fixture
async def gates() -> AsyncIterator[list[Gate]]:
    """Four; all are let go in the end."""
    made = [Gate() for _ in range(4)]
    yield made
    for gate in made:
        gate.may_end.set()


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.has_begun.wait, LIMIT_S)


async def test_results_and_errors_are_the_works() -> None:
    threads = BoundedThreads(1, LIMIT_S, LIMIT_S)
    assert await threads.run(1, lambda: 7) == 7
    with pytest.raises(KeyError):
        await threads.run(1, lambda: dict[str, int]()["x"])
    assert threads.num_running == 0


async def test_no_more_at_once_than_the_capacity(gates: list[Gate]) -> None:
    threads = BoundedThreads(10, LIMIT_S, LIMIT_S)
    first = asyncio.create_task(threads.run(6, gates[0]))
    await begun(gates[0])
    large = asyncio.create_task(threads.run(1000, gates[1]))  # alone, although it is more than there is
    small = asyncio.create_task(threads.run(1, gates[2]))  # behind it: first come, first served
    for _ in range(10):
        await asyncio.sleep(0)
    assert threads.num_running == 1
    gates[0].may_end.set()
    assert await first == "done"
    await begun(gates[1])
    assert threads.num_running == 1
    gates[1].may_end.set()
    await begun(gates[2])
    gates[2].may_end.set()
    assert await asyncio.gather(large, small) == ["done", "done"]


async def test_no_more_threads_at_once_than_allowed(gates: list[Gate]) -> None:
    threads = BoundedThreads(10, LIMIT_S, LIMIT_S, num_threads=2)
    tasks = [asyncio.create_task(threads.run(1, gate)) for gate in gates[:3]]
    await begun(gates[0])
    await begun(gates[1])
    assert not gates[2].has_begun.is_set()
    gates[1].may_end.set()
    await begun(gates[2])
    for gate in gates:
        gate.may_end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 3


async def test_what_is_cheap_does_not_wait_for_what_is_not(gates: list[Gate]) -> None:
    threads = BoundedThreads(100, LIMIT_S, LIMIT_S, num_threads=1, large_cost=10)
    large = [asyncio.create_task(threads.run(20, gate)) for gate in gates[:2]]
    await begun(gates[0])
    assert await threads.run(10, lambda: "small") == "small"
    assert not gates[1].has_begun.is_set()
    for gate in gates:
        gate.may_end.set()
    assert await asyncio.gather(*large) == ["done"] * 2


async def test_a_thread_that_takes_too_long_stands_in_nobodys_way(gates: list[Gate]) -> None:
    threads = BoundedThreads(10, 0.05, LIMIT_S, num_threads=1)
    with pytest.raises(PreprocessFailedError):
        await threads.run(1, gates[0])
    assert await threads.run(1, lambda: "next") == "next"


async def test_work_that_takes_too_long_fails_and_keeps_its_share(gates: list[Gate]) -> None:
    threads = BoundedThreads(10, 0.05, LIMIT_S)
    with pytest.raises(PreprocessFailedError):
        await threads.run(10, gates[0])
    waiting = asyncio.create_task(threads.run(1, lambda: "next"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert threads.num_running == 1  # the one that was given up
    threads.check()  # not stuck yet
    gates[0].may_end.set()
    assert await waiting == "next"


async def test_a_thread_that_does_not_end_ends_the_service(gates: list[Gate]) -> None:
    threads = BoundedThreads(10, 0.0, 0.0)
    threads.check()
    with pytest.raises(PreprocessFailedError):
        await threads.run(1, gates[0])
    with pytest.raises(EngineFailedError):
        threads.check()


async def test_a_caller_that_is_cancelled_while_it_waits_takes_nothing(gates: list[Gate]) -> None:
    threads = BoundedThreads(1, LIMIT_S, LIMIT_S)
    first = asyncio.create_task(threads.run(1, gates[0]))
    await begun(gates[0])
    second, third = (asyncio.create_task(threads.run(1, lambda: "late")) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    gates[0].may_end.set()
    assert await first == "done"
    assert await third == "late"
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_a_caller_that_is_cancelled_as_its_turn_comes_takes_nothing(
    gates: list[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = BoundedThreads(1, LIMIT_S, LIMIT_S)
    first = asyncio.create_task(threads.run(1, gates[0]))
    await begun(gates[0])
    second, third = (asyncio.create_task(threads.run(1, lambda: "late")) for _ in range(2))
    await asyncio.sleep(0)
    loop, has_ended = asyncio.get_running_loop(), threading.Event()
    hand_over = loop.call_soon_threadsafe

    def note_end(callback: Callable[..., object], *args: object) -> asyncio.Handle:
        handle = hand_over(callback, *args)
        has_ended.set()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", note_end)
    gates[0].may_end.set()
    assert has_ended.wait(LIMIT_S)  # its result waits for the loop
    loop.call_soon(second.cancel)  # after the result, before what the result calls
    assert await first == "done"
    with pytest.raises(asyncio.CancelledError):
        await second
    async with asyncio.timeout(LIMIT_S):
        assert await third == "late"
    assert await threads.run(1, lambda: "next") == "next"


async def test_without_threads_work_fails_and_the_next_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = BoundedThreads(1, LIMIT_S, LIMIT_S)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(PreprocessFailedError):
            await threads.run(1, lambda: 1)
    assert await threads.run(1, lambda: 2) == 2


async def test_time_that_other_programs_have_the_core_does_not_count(
    gates: list[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock the work has taken ten times its limit, all of it spent in waiting for a core."""
    limit_s = 0.02
    threads = BoundedThreads(1, limit_s, LIMIT_S)
    real, waits = bounded_threads.waited_s, iter([0.02, 0.04, 0.06])
    monkeypatch.setattr(bounded_threads, "waited_s", lambda thread: next(waits, LIMIT_S))
    first = asyncio.create_task(threads.run(1, gates[0]))
    await begun(gates[0])
    await asyncio.wait({first}, timeout=10 * limit_s)
    assert not first.done()
    gates[0].may_end.set()
    assert await first == "done"
    assert real(threading.get_native_id()) >= 0
    assert real(0) == 0  # there is no such thread


async def test_time_that_a_decoding_process_waits_for_a_core_does_not_count(gates: list[Gate]) -> None:
    limit_s = 0.02
    threads = BoundedThreads(1, limit_s, LIMIT_S)

    def decode() -> str:
        CORE_WAITS.get().follow(lambda: LIMIT_S)
        return gates[0]()

    first = asyncio.create_task(threads.run(1, decode))
    await begun(gates[0])
    await asyncio.wait({first}, timeout=10 * limit_s)
    assert not first.done()
    gates[0].may_end.set()
    assert await first == "done"
