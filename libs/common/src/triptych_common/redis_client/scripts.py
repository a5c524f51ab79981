"""Lua scripts in files of their own: `lua/{name}.lua`. Redis runs each as one step."""

from functools import cache
from importlib.resources import files


@cache
def script(name: str) -> str:
    """The script's text."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text()
