"""`check`: everything about the code that can be checked in about a minute."""

import subprocess
import sys
import time
from pathlib import Path

from triptych_cli.console import out
from triptych_cli.settings import CHECKOUT

STEP_LIMIT_S = 900.0


def steps() -> list[tuple[str, list[str]]]:
    """Steps in order: name and command."""
    python = sys.executable
    tools = Path(python).parent
    packages = sorted(
        folder.name
        for group in ("libs", "services")
        for folder in CHECKOUT.glob(f"{group}/*/src/triptych_*")
        if (folder / "__init__.py").exists()
    )
    layers = [CHECKOUT / "tests" / layer for layer in ("unit", "contract")]
    quick_tests = [str(layer) for layer in layers if any(layer.rglob("test_*.py"))]
    return [
        ("format", [python, "-m", "ruff", "format", "--check", "."]),
        ("lint", [python, "-m", "ruff", "check", "."]),
        ("types", [python, "-m", "mypy", *(part for name in packages for part in ("-p", name))]),
        ("test types", [python, "-m", "mypy", "benchmarks", "tests/support"]),
        ("imports", [str(tools / "lint-imports"), "--no-cache"]),
        ("tests", [python, "-m", "pytest", "-q", *quick_tests]),
    ]


def check() -> int:
    """Run every step, even after a failure; 0 if all pass."""
    failed = []
    for name, command in steps():
        start = time.monotonic()
        with out.status(f"{name} ..."):
            try:
                result = subprocess.run(
                    command, check=False, cwd=CHECKOUT, capture_output=True, text=True, timeout=STEP_LIMIT_S
                )
                code, output = result.returncode, result.stdout + result.stderr
            except subprocess.TimeoutExpired:
                code, output = 1, f"not finished after {STEP_LIMIT_S:.0f} s"
        mark = "[green]✓[/]" if code == 0 else "[red]✗[/]"
        out.print(f"{mark} {name:<10} [dim]{time.monotonic() - start:.1f} s[/]")
        if code != 0:
            failed.append(name)
            out.print(output, markup=False, soft_wrap=True)
    return 1 if failed else 0
