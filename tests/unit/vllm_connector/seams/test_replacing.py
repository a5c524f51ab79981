"""A part of vLLM is replaced wherever vLLM uses it, or the start fails."""

import sys
from types import ModuleType
from typing import Any

import pytest

from triptych_vllm_connector.seams.replacing import SeamNotFoundError, replace, require_names

DEFINING = """
def parse(text): return "vllm " + text
PARSERS = {"default": parse}
class Reader:
    def read(self, text): return self.clean(parse(text))
    def clean(self, text): return text
"""
USING = """
from vllm.defining import parse
def use(text): return parse(text)
def use_other(text): return other(text)
"""


def module_of(name: str, source: str) -> Any:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))  # noqa: S102 -- stands for a module of vLLM's
    return module


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    for name in ("vllm.defining", "vllm.using"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return module_of("vllm.defining", DEFINING), module_of("vllm.using", USING)


def ours(text: str) -> str:
    return "ours " + text


def test_a_module_that_has_imported_the_name_uses_the_replacement(modules: tuple[Any, Any]) -> None:
    defining, using = modules
    original = replace(defining, "parse", ours, used_by=(using.use,))
    assert (using.use("x"), defining.Reader().read("x")) == ("ours x", "ours x")
    assert defining.PARSERS["default"]("x") == "ours x"
    assert original("x") == "vllm x"


def test_a_copy_that_would_stay_in_use_is_an_error(modules: tuple[Any, Any]) -> None:
    defining, using = modules
    with pytest.raises(SeamNotFoundError, match="use of vLLM uses a parse of its own"):
        replace(defining, "parse", ours, used_by=(using.use,), everywhere=False)


def test_a_name_that_vllm_does_not_use_is_an_error(modules: tuple[Any, Any]) -> None:
    defining, using = modules
    with pytest.raises(SeamNotFoundError, match="use_other of vLLM does not use parse"):
        replace(defining, "parse", ours, used_by=(using.use_other,))
    assert using.use("x") == "vllm x"


def test_a_name_that_vllm_does_not_have_is_an_error(modules: tuple[Any, Any]) -> None:
    defining, using = modules
    with pytest.raises(SeamNotFoundError, match=r"vLLM has no vllm\.defining\.parse_text"):
        replace(defining, "parse_text", ours, used_by=(using.use,))


def test_a_method_is_replaced_for_one_object_or_for_all(modules: tuple[Any, Any]) -> None:
    reader_cls = modules[0].Reader
    one, other = reader_cls(), reader_cls()
    replace(one, "clean", str.upper, used_by=(reader_cls.read,))
    assert (one.read("x"), other.read("x")) == ("VLLM X", "vllm x")
    replace(reader_cls, "clean", lambda self, text: "-", used_by=(one.read,))
    assert other.read("x") == "-"


def test_names_in_inner_functions_count() -> None:
    def outer() -> Any:
        return lambda reader: reader.busy_loop_s

    require_names((outer,), "busy_loop_s")
    with pytest.raises(SeamNotFoundError, match="does not use last_read"):
        require_names((outer,), "busy_loop_s", "last_read")
