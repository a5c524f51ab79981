"""Replaces a part of vLLM, and checks that vLLM will use the replacement.

A module that has imported a name keeps what it imported, and a function that was renamed is never called: a
replacement would be without effect, and nothing would fail. So `replace` also replaces the name wherever a
module of vLLM has it, and is given the functions of vLLM that are to use it.
"""

import inspect
import sys
from collections.abc import Collection, Iterator
from types import CodeType, ModuleType
from typing import Any

from triptych_common.domain.errors import TriptychError


class SeamNotFoundError(TriptychError):
    """vLLM has no such part, or does not use it: this version is not supported."""


def replace(owner: Any, name: str, value: Any, *, used_by: Collection[Any], everywhere: bool = True) -> Any:
    """Replace `owner.name` by `value`; returns what was there.

    Args:
        owner: a module, class or object of vLLM's.
        used_by: functions of vLLM that use the name, at least one.
        everywhere: for a module, whether others that have imported the name get the replacement too.

    Raises:
        SeamNotFoundError: there is no such name, or one of `used_by` does not use it, or another one.
    """
    original = getattr(owner, name, None)
    if original is None and not hasattr(owner, name):
        raise SeamNotFoundError(f"vLLM has no {_text(owner)}.{name}")
    require_names(used_by, name)
    setattr(owner, name, value)
    if isinstance(owner, ModuleType) and everywhere:
        for module in _vllm_modules():
            if vars(module).get(name) is original:
                setattr(module, name, value)
        for table in tuple(vars(owner).values()):
            if callable(original) and isinstance(table, dict):
                table |= {key: value for key, each in table.items() if each is original}
    for function in used_by:
        used = _unwrapped(function).__globals__.get(name, value)
        if isinstance(owner, ModuleType) and used is not value:
            raise SeamNotFoundError(f"{_text(function)} of vLLM uses a {name} of its own")
    return original


def require_names(functions: Collection[Any], *names: str) -> None:
    """Check that each of vLLM's functions uses all names, as variables or attributes.

    Raises:
        SeamNotFoundError: one does not; its code is another one than ours was written for.
    """
    for function in functions:
        missing = set(names) - set(_names_in(_unwrapped(function).__code__))
        if missing:
            raise SeamNotFoundError(f"{_text(function)} of vLLM does not use {', '.join(sorted(missing))}")


def _unwrapped(function: Any) -> Any:
    """Python function behind wrappers and bound methods, which is the one with vLLM's code."""
    return inspect.unwrap(getattr(function, "__func__", function))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _vllm_modules() -> Iterator[ModuleType]:
    for name, module in tuple(sys.modules.items()):
        if (name == "vllm" or name.startswith("vllm.")) and isinstance(module, ModuleType):
            yield module


def _text(part: Any) -> str:
    name = getattr(part, "__qualname__", None) or getattr(part, "__name__", None) or type(part).__qualname__
    return str(name)


def is_wrapped(function: Any) -> bool:
    """True if `functools.wraps` has made it, as all wrappers of ours: it need not be wrapped again."""
    return hasattr(function, "__wrapped__")
