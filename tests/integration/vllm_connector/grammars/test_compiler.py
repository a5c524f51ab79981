"""Grammars of callers, in real compile processes: whatever they do ends one process, and one request."""

import asyncio
import json
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from tests.support.vllm_connector.grammars import (
    NESTED,
    OBJECT,
    OF_EACH_KIND,
    TOKENIZER,
    accepts,
    large_vocabulary,
    schema,
)
from tests.support.waiting import wait_until
from triptych_vllm_connector.grammars import compiler as compiler_module
from triptych_vllm_connector.grammars.compiled import CompiledGrammarGoneError, ReadGrammars
from triptych_vllm_connector.grammars.compiler import GrammarCompiler, GrammarRefusedError
from triptych_vllm_connector.grammars.grammar_job import GrammarJob

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 2.0
MEMORY_BYTES = 256 << 20


ENDLESS = schema(6000)  # takes minutes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GrammarCompiler]:
    opened = GrammarCompiler.open(TOKENIZER.serialize_json(), timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
    async with opened as compiler:
        yield compiler


def compile_processes(compiler: GrammarCompiler) -> list[psutil.Process]:
    return psutil.Process(compiler.server_pid).children()


async def test_the_slowest_grammars_reach_the_engine_as_they_were_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "LIGHT_CPU_S", -1.0)
    monkeypatch.setattr(compiler_module, "RECOMPILE_CPU_S", -1.0)  # so that each of them is
    info = TOKENIZER.serialize_json()
    grammars = ReadGrammars(TOKENIZER)
    async with GrammarCompiler.open(info, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES) as compiler:
        for job, good, bad in OF_EACH_KIND:
            slow = await compiler.compile(job, "")
            assert slow is not None
            compiled = grammars.read(*slow.place)
            assert accepts(compiled, good), job
            assert not accepts(compiled, bad), job
            assert grammars.read(*slow.place) is compiled, "read once"
            path, inode = slow.place
            with pytest.raises(CompiledGrammarGoneError):
                grammars.read(path, inode + 1)


async def test_a_crash_ends_one_request(shared: GrammarCompiler) -> None:
    pid = shared.server_pid
    poison = GrammarJob("json", json.dumps({"type": "string", "pattern": NESTED}))
    answers = await asyncio.gather(
        shared.compile(poison, "poisoner"), shared.compile(OBJECT, "neighbour"), return_exceptions=True
    )
    assert isinstance(answers[0], GrammarRefusedError)
    assert "too complex" in str(answers[0])
    assert answers[1] is None, "light"
    assert shared.server_pid == pid


async def test_a_grammar_that_is_not_valid_is_refused_with_its_fault(shared: GrammarCompiler) -> None:
    with pytest.raises(GrammarRefusedError, match=r"is not valid: .*Unclosed"):
        await shared.compile(GrammarJob("regex", "["), "")


async def test_a_grammar_that_takes_too_long_is_refused(shared: GrammarCompiler) -> None:
    with pytest.raises(
        GrammarRefusedError, match="is too complex: it was not compiled within 2 s of CPU time and 256 MiB"
    ):
        await shared.compile(ENDLESS, "")
    await asyncio.to_thread(wait_until, lambda: not compile_processes(shared), 5, "the process has ended")


@pytest.mark.slow
async def test_a_grammar_that_would_keep_the_engine_is_refused_before_it_gets_there() -> None:
    """It compiles in 0.1 s, and each token would take 30 ms of the engine's loop."""
    opened = GrammarCompiler.open(
        large_vocabulary().serialize_json(), timeout_s=20.0, memory_bytes=MEMORY_BYTES
    )
    async with opened as compiler:
        with pytest.raises(GrammarRefusedError, match="too much CPU time with each token"):
            await compiler.compile(GrammarJob("json", '{"type": "string", "pattern": "^.{1,500}$"}'), "")
        assert await compiler.compile(OBJECT, "") is None


async def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    opened = GrammarCompiler.open(TOKENIZER.serialize_json(), timeout_s=60.0, memory_bytes=1 << 20)
    async with opened as compiler:
        with pytest.raises(GrammarRefusedError, match="too complex"):
            await compiler.compile(schema(300), "")
        assert await compiler.compile(OBJECT, "") is None


async def test_one_tenants_grammars_do_not_keep_anothers_waiting(shared: GrammarCompiler) -> None:
    many = [asyncio.create_task(shared.compile(schema(6001 + number), "attacker")) for number in range(20)]
    await asyncio.to_thread(
        wait_until, lambda: bool(compile_processes(shared)), 30, "one of them is compiled"
    )
    assert await shared.compile(GrammarJob("regex", "[a-z]"), "neighbour") is None
    assert sum(task.done() for task in many) <= 1
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    await asyncio.to_thread(
        wait_until, lambda: not compile_processes(shared), 1, "their processes have ended"
    )


async def test_a_caller_who_goes_away_ends_the_compile_process(shared: GrammarCompiler) -> None:
    asked = asyncio.create_task(shared.compile(schema(7000), ""))
    await asyncio.to_thread(wait_until, lambda: bool(compile_processes(shared)), 30, "it is compiled")
    (process,) = compile_processes(shared)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not process.is_running(), 1, "the process has ended")


async def test_what_one_tenant_uses_is_not_known_to_another(
    shared: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[GrammarJob] = []
    original = shared._compile

    async def count(job: GrammarJob) -> object:
        compiled.append(job)
        return await original(job)

    monkeypatch.setattr(shared, "_compile", count)
    job = GrammarJob("regex", "[a-f]{3}")
    for tenant in ("first", "second", "first", "second"):
        await shared.compile(job, tenant)
    assert len(compiled) == 2


async def test_a_server_that_was_killed_is_started_again(shared: GrammarCompiler) -> None:
    before = psutil.Process(shared.server_pid)
    before.kill()
    assert await shared.compile(GrammarJob("regex", "x"), "") is None
    assert shared.server_pid != before.pid
