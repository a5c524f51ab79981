"""A warm-up leaves it to the first caller which backend vLLM uses for structured outputs."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_vllm_connector import plugin
from triptych_vllm_connector.plugin import RELEASE_BACKEND

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.v1 import structured_output
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.structured_output import StructuredOutputManager


class Backend:
    """In the place of one of vLLM's."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class XgrammarBackend(Backend): ...


class GuidanceBackend(Backend): ...


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of EngineCore as is looked at, with vLLM's own manager."""
    for backend in (XgrammarBackend, GuidanceBackend):
        monkeypatch.setattr(structured_output, backend.__name__, backend)
    plugin._let_host_release_backend()
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 8),
        structured_outputs_config=SimpleNamespace(backend="auto"),
    )
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.__dict__ |= {
        "backend": None, "vllm_config": config, "tokenizer": None, "executor": SimpleNamespace(submit=id),
        "_use_async_grammar_compilation": True,
    }  # fmt: skip
    manager._create_grammar = manager.executor.submit = lambda *_: None
    return SimpleNamespace(structured_output_manager=manager, vllm_config=config)


def ask(core: Any, backend: str) -> Any:
    params = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=backend))
    request = SimpleNamespace(structured_output_request=SimpleNamespace(), sampling_params=params)
    core.structured_output_manager.grammar_init(request)
    return core.structured_output_manager.backend


@pytest.mark.parametrize("first", ["xgrammar", "guidance"])
def test_the_first_caller_chooses(core: Any, first: str) -> None:
    warm = ask(core, "xgrammar")
    getattr(EngineCore, RELEASE_BACKEND)(core)
    chosen = ask(core, first)
    if first == "xgrammar":
        assert chosen is warm, "the vocabulary is not read again"
    else:
        assert isinstance(chosen, GuidanceBackend)


def test_a_backend_that_an_option_names_stays(core: Any) -> None:
    core.vllm_config.structured_outputs_config.backend = "xgrammar"
    warm = ask(core, "xgrammar")
    getattr(EngineCore, RELEASE_BACKEND)(core)
    assert core.structured_output_manager.backend is warm
