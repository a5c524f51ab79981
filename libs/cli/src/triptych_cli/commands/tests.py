"""`test`: pytest over the layers of tests/."""

import subprocess
import sys
from pathlib import Path

from triptych_cli.console import fail, out
from triptych_cli.settings import CHECKOUT

LAYERS = {
    "unit": "pure logic, no input or output",
    "property": "hypothesis state machines",
    "contract": "golden bytes of messages; docs in step with the code",
    "integration": "real Redis, real shared memory, real processes",
    "engine": "real vLLM",
    "chaos": "parts are killed and stopped",
    "gpu": "skipped, with the reason, where there is no NVIDIA GPU",
}


def run_tests(layer: str | None, extra: list[str]) -> int:
    """Run one layer, or all; `extra` goes to pytest. Its exit code."""
    if layer is not None and layer != "all" and layer not in LAYERS:
        if not layer.startswith("-") and not Path(layer).exists():
            fail(f"no layer {layer!r}; there are: {', '.join(LAYERS)}, all")
            return 2
        extra = [layer, *extra]  # a word for pytest
        layer = None
    chosen = list(LAYERS) if layer is None else [name for name in LAYERS if layer in ("all", name)]
    names_tests = any(not word.startswith("-") and Path(word.split("::")[0]).exists() for word in extra)
    paths: list[str] = []
    for name in () if names_tests else chosen:
        folder = CHECKOUT / "tests" / name
        there = any(folder.rglob("test_*.py"))
        out.print(f"  {name:<12} {LAYERS[name] if there else '[dim]no tests yet[/]'}")
        if there:
            paths.append(str(folder))
    if not paths and not names_tests:
        fail("nothing to run")
        return 1
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", f"--rootdir={CHECKOUT}", f"-c{CHECKOUT / 'pyproject.toml'}"]
    return subprocess.run([*command, *paths, *extra], check=False).returncode
