"""`test`, `check`, `bench` and `soak`: scripts of the checkout, each with options of its own."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from triptych_cli.console import fail, out
from triptych_cli.settings import CHECKOUT


def bench(name: str | None, extra: list[str]) -> int:
    """Run `benchmarks/NAME.py`; without a name, list them."""
    scripts = scripts_there()
    if name is None:
        for stem, file in scripts.items():
            summary = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
            out.print(f"  {stem:<16} {summary[0] if summary else ''}", markup=False, soft_wrap=True)
        return 0
    if name not in scripts:
        fail(f"no benchmark {name!r}; there are: {', '.join(scripts)}")
        return 2
    return run_script(scripts[name], extra)


def soak(
    part: str,
    minutes: float,
    seed: int,
    report: Path | None,
    engine: str | None = None,
    topology: str | None = None,
) -> int:
    """Run `benchmarks/soak_PART.py`.

    Args:
        report: a file for its figures.
        engine: one that the part knows.
        topology: likewise.
    """
    scripts = {stem: file for stem, file in scripts_there().items() if stem.startswith("soak_")}
    script = scripts.get(f"soak_{part}")
    if script is None:
        parts = ", ".join(stem.removeprefix("soak_") for stem in scripts)
        fail(f"no soak of {part!r}; there are: {parts}")
        return 2
    options = [f"--minutes={minutes}", f"--seed={seed}"]
    if report is not None:
        options.append(f"--json={report}")
    if engine is not None:
        options.append(f"--engine={engine}")
    if topology is not None:
        options.append(f"--topology={topology}")
    return run_script(script, options)


def run_script(script: str | Path, arguments: Sequence[str]) -> int:
    """Run a script at its path in the checkout; returns its exit code."""
    return subprocess.run([sys.executable, str(CHECKOUT / script), *arguments], check=False).returncode


def scripts_there() -> dict[str, Path]:
    """Benchmark scripts of the checkout, by name."""
    return {file.stem: file for file in sorted((CHECKOUT / "benchmarks").glob("[a-z]*.py"))}
