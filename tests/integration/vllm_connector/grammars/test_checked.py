"""A structured request on its way into the engine: vLLM's own classes around real compile processes."""

import json
import threading
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm_connector.grammars import (
    NESTED,
    NUM_TOKENS,
    TAG,
    TOKENIZER,
    accepts,
    schema,
)
from triptych_vllm_connector.grammars import compiler as compiler_module
from triptych_vllm_connector.grammars.compile_server import compile_grammar
from triptych_vllm_connector.grammars.compiled import SLOW_FIELD, use_slow_lane
from triptych_vllm_connector.grammars.compiler import GrammarCompiler
from triptych_vllm_connector.grammars.grammar_job import GrammarJob
from triptych_vllm_connector.grammars.token_cost import GROUP_FIELD

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import xgrammar
    from vllm.exceptions import VLLMValidationError
    from vllm.parser import abstract_parser
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager, backend_xgrammar
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.request import StructuredOutputRequest

    from triptych_vllm_connector.grammars.checked import check_requests, group_of, leave_conversion_out

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated"),  # vLLM sets it
]

POISON = {"type": "string", "pattern": NESTED}
FIELDS: dict[str, Any] = {
    "json": {"type": "integer"},
    "regex": "[0-9]",
    "choice": ['a"b', "c\n"],
    "grammar": 'root ::= "a"',
    "structural_tag": json.dumps(TAG),
}


class Engine:
    """In the place of vLLM's `AsyncLLM`: records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []
        self.vllm_config = SimpleNamespace(
            structured_outputs_config=SimpleNamespace(disable_any_whitespace=False)
        )

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **_: Any) -> str:
        self.asked.append(params)
        return request_id


def structured(**fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))


def prompt(tenant: str = "") -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": [1], "cache_salt": tenant}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    async with GrammarCompiler.open(
        TOKENIZER.serialize_json(), timeout_s=2.0, memory_bytes=256 << 20
    ) as each:
        yield each


@pytest.fixture
def engine(compiler: GrammarCompiler) -> Engine:
    checked = Engine()
    check_requests(checked, compiler)
    return checked


@pytest.fixture
def backend() -> Any:
    """vLLM's, for this tokenizer."""
    made = backend_xgrammar.XgrammarBackend.__new__(backend_xgrammar.XgrammarBackend)
    made.disable_any_whitespace = False
    made.compiler = xgrammar.GrammarCompiler(TOKENIZER)
    made.vocab_size, made.num_speculative_tokens = NUM_TOKENS, 0
    return made


@pytest.fixture
def manager(backend: Any) -> StructuredOutputManager:
    """vLLM's in EngineCore."""
    use_slow_lane()
    made = StructuredOutputManager.__new__(StructuredOutputManager)
    made.backend, made._use_async_grammar_compilation = backend, True
    return made


async def test_a_grammar_that_ends_a_process_does_not_reach_the_engine(engine: Engine) -> None:
    with pytest.raises(VLLMValidationError, match=r"structured_outputs\.json is too complex") as caught:
        await engine.add_request("1", prompt(), structured(json=POISON))
    assert caught.value.parameter == "structured_outputs"
    assert not engine.asked


@pytest.mark.parametrize("field", FIELDS)
async def test_what_compiles_goes_on_with_the_name_of_its_request(engine: Engine, field: str) -> None:
    params = structured(**{field: FIELDS[field]})
    assert await engine.add_request("1", prompt(), params) == "1"
    (asked,) = engine.asked
    assert params.extra_args is None, "it may be another prompt's, too"
    assert asked.extra_args == {GROUP_FIELD: "1"}
    asked.extra_args = None
    assert asked == params


@pytest.mark.parametrize(
    "request_id",
    ["chatcmpl-req-0af", "cmpl-req-0af-12", "chatcmpl-req-0af_3", "cmpl-req-0af-1-beam-2"],
)
async def test_prompts_and_beams_have_the_name_of_their_request(request_id: str) -> None:
    assert group_of(request_id) == "req-0af"
    assert group_of("chatcmpl-0af-1") == "chatcmpl-0af-1", "of no gateway: each for itself"


async def test_json_objects_and_plain_requests_are_compiled_by_nobody(
    engine: Engine, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(GrammarCompiler, "_compile")
    for params in (SamplingParams(), structured(json_object=True)):
        await engine.add_request("1", prompt(), params)
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    "params", [{"json": "{"}, {"regex": "["}, {"grammar": "root = ("}, {"structural_tag": "{}"}],
    ids=str,
)  # fmt: skip
async def test_a_grammar_that_is_not_valid_is_the_callers_fault(
    engine: Engine, params: dict[str, Any]
) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs") as caught:
        await engine.add_request("1", prompt(), structured(**params))
    assert caught.value.parameter == "structured_outputs"
    assert not engine.asked


@pytest.mark.parametrize("mark", [{SLOW_FIELD: ["/etc/passwd", 1]}, {GROUP_FIELD: "another's"}], ids=str)
async def test_a_caller_cannot_mark_a_grammar(engine: Engine, mark: dict[str, Any]) -> None:
    params = structured(regex="a")
    params.extra_args = mark
    with pytest.raises(VLLMValidationError, match="may not be set"):
        await engine.add_request("1", prompt(), params)
    assert not engine.asked


async def test_the_host_converts_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of these ended this process."""
    monkeypatch.setattr(backend_xgrammar, "xgr", backend_xgrammar.xgr)
    monkeypatch.setattr(abstract_parser, "Grammar", abstract_parser.Grammar)  # both are put back
    leave_conversion_out()
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": NESTED}}
    for fields in ({"json": POISON}, {"regex": NESTED}, {"structural_tag": json.dumps(tag)}):
        backend_xgrammar.validate_xgrammar_grammar(structured(**fields))
    with pytest.raises(VLLMValidationError, match="not supported by xgrammar"):  # vLLM's own checks go on
        backend_xgrammar.validate_xgrammar_grammar(structured(json={"type": "integer", "multipleOf": 2}))
    with pytest.raises(VLLMValidationError, match="Invalid grammar"):
        abstract_parser.structured_outputs_to_format(StructuredOutputsParams(grammar="start: " + NESTED))


@pytest.mark.parametrize("field", FIELDS)
async def test_the_compile_server_compiles_as_vllm_does(backend: Any, field: str) -> None:
    params = structured(**{field: FIELDS[field]})
    job = GrammarJob.try_from_params(params.structured_outputs, is_compact=False)
    assert job is not None
    backend_xgrammar.validate_xgrammar_grammar(params)  # makes a grammar of choices
    key = StructuredOutputRequest(params=params.structured_outputs).structured_output_key
    ours, theirs = compile_grammar(job._asdict(), TOKENIZER), backend.compile_grammar(*key).ctx
    assert str(ours.grammar) == str(theirs.grammar)


async def test_the_engine_reads_what_was_compiled_in_a_thread_apart(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "LIGHT_CPU_S", -1.0)
    monkeypatch.setattr(compiler_module, "RECOMPILE_CPU_S", -1.0)
    info = TOKENIZER.serialize_json()
    threads: list[str] = []
    read = xgrammar.CompiledGrammar.deserialize_json

    def read_noting(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr(xgrammar.CompiledGrammar, "deserialize_json", read_noting)
    async with GrammarCompiler.open(info, timeout_s=2.0, memory_bytes=256 << 20) as compiler:
        engine = Engine()
        check_requests(engine, compiler)
        original = structured(regex="[0-9]{2}")
        await engine.add_request("1", prompt(), original)
        (params,) = engine.asked
        assert original.extra_args is None, "it may be another prompt's, too"
        request = SimpleNamespace(
            request_id="1",
            sampling_params=params,
            structured_output_request=StructuredOutputRequest(params=params.structured_outputs),
        )
        manager.executor = None  # of light grammars
        manager.grammar_init(request)
        grammar = request.structured_output_request._grammar.result(30)
    assert threads[0].startswith("triptych-slow-grammars")
    assert accepts(grammar.ctx, "42")
    assert manager.executor is None


async def test_the_engine_compiles_an_accepted_regular_expression_however_busy_the_machine_is(
    manager: StructuredOutputManager, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own deadline is by the wall clock."""

    def end(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(Future, "result", end)
    grammar = backend.compile_grammar(StructuredOutputOptions.REGEX, "[0-9]{2}")
    assert accepts(grammar.ctx, "42")


async def test_a_slow_grammar_that_is_not_the_slowest_is_marked_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "LIGHT_CPU_S", -1.0)
    slow = await compiler.compile(schema(20), "")
    assert slow is not None
    assert slow.place == [], "EngineCore compiles it, in its slow lane"
