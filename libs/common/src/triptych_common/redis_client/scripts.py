"""Lua scripts: `lua/{name}.lua` of the package that runs them. Redis runs each as one step.

A script's header names its arguments. The names are local variables of the script, and keyword arguments
of `LuaScript.arguments`; with a `*` the last one is a table of all that follow:

    -- KEYS: flight stream
    -- ARGV: mode job attempt *requesters
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

Value = str | bytes | int
_HEADER = re.compile(r"^-- (KEYS|ARGV):((?: \*?\w+)+)", re.MULTILINE)


@dataclass(frozen=True)
class LuaScript:
    """A script's text, and the names of its arguments in order."""

    name: str
    text: str
    argument_names: tuple[str, ...]

    def arguments(self, rest: Iterable[Value] = (), **named: Value) -> list[Value]:
        """Return ARGV; `rest` are the values of the last name if that has a `*`."""
        if named.keys() != set(self.argument_names):
            raise TypeError(f"{self.name} takes {self.argument_names}, not {tuple(named)}")
        return [*(named[each] for each in self.argument_names), *rest]


def load_script(package: str, name: str, *, prelude: str = "") -> LuaScript:
    """Load the script `name` of `package`; `prelude` is Lua between the names and the script."""
    body = files(package).joinpath("lua", f"{name}.lua").read_text("utf-8")
    names = {table: found.split() for table, found in _HEADER.findall(body)}
    locals_ = [_local(table, index, each) for table, of in names.items() for index, each in enumerate(of, 1)]
    named = tuple(each for each in names.get("ARGV", ()) if not each.startswith("*"))
    return LuaScript(name, "\n".join((*locals_, prelude, body)), named)


def _local(table: str, index: int, name: str) -> str:
    if not name.startswith("*"):
        return f"local {name} = {table}[{index}]"
    rest = name.removeprefix("*")
    return f"local {rest} = {{}} for i = {index}, #{table} do {rest}[#{rest} + 1] = {table}[i] end"


EXTEND_EXPIRY = load_script(__package__, "extend_expiry")
