"""`bench`: the scripts of benchmarks/, each with options of its own."""

import ast
import subprocess
import sys

from triptych_cli.console import fail, out
from triptych_cli.settings import CHECKOUT


def bench(name: str | None, extra: list[str]) -> int:
    """Run `benchmarks/NAME.py`; without a name, say what there is."""
    scripts = {file.stem: file for file in sorted((CHECKOUT / "benchmarks").glob("[a-z]*.py"))}
    if name is None:
        for stem, file in scripts.items():
            words = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
            out.print(f"  {stem:<16} {words[0] if words else ''}", markup=False, soft_wrap=True)
        return 0
    if name not in scripts:
        fail(f"no benchmark {name!r}; there are: {', '.join(scripts)}")
        return 2
    return subprocess.run([sys.executable, str(scripts[name]), *extra], check=False).returncode
