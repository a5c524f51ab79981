"""`test`: runs pytest over the layers of tests/.

Tests marked `long` take minutes each and run when asked for: with `--long`, or by their file. Several files
run at a time of the layers without engines, which come first, and of the chaos layer, which comes last: many
of them wait for most of their time. A failure is shown when it happens, and each of the three runs ends by
itself, with what it has seen, on a machine that is far too slow: whoever waits for the end learns why.
"""

import subprocess
import sys
from collections.abc import Sequence
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


LONG = "--long"
FIRST = ("unit", "property", "contract", "integration")
LAST = ("chaos",)
THREE_FILES_AT_A_TIME = ["-n3", "--dist=loadfile"]
SHOW_AT_ONCE = ["--instafail", "--tb=short"]
NOTHING_RAN = 5  # pytest's exit code


def run_tests(layer: str | None, extra: list[str]) -> int:
    """Run one layer, or all, with `extra` for pytest; returns its exit code."""
    if layer is not None and layer != "all" and layer not in LAYERS:
        if not layer.startswith("-") and not Path(layer).exists():
            fail(f"no layer {layer!r}; there are: {', '.join(LAYERS)}, all")
            return 2
        extra = [layer, *extra]  # an argument for pytest
        layer = None
    if any(not argument.startswith("-") and Path(argument.split("::")[0]).exists() for argument in extra):
        return _pytest([], [argument for argument in extra if argument != LONG])
    chosen = list(LAYERS) if layer is None else [name for name in LAYERS if layer in ("all", name)]
    folders = {}
    for name in chosen:
        folder = CHECKOUT / "tests" / name
        there = any(folder.rglob("test_*.py"))
        out.print(f"  {name:<12} {LAYERS[name] if there else '[dim]no tests yet[/]'}")
        if there:
            folders[name] = str(folder)
    if not folders:
        fail("nothing to run")
        return 1
    return _run(folders, extra)


def _run(folders: dict[str, str], extra: list[str]) -> int:
    if LONG in extra:
        extra = [argument for argument in extra if argument != LONG]
    elif not any(argument.startswith("-m") for argument in extra):
        extra = ["-m", "not long", *extra]
    rest = [name for name in folders if name not in (*FIRST, *LAST)]
    codes: list[int] = []
    runs: tuple[tuple[Sequence[str], list[str], int], ...] = (
        (FIRST, THREE_FILES_AT_A_TIME, 30),
        (rest, [], 35),
        (LAST, THREE_FILES_AT_A_TIME, 20),
    )
    for names, parallel, limit_min in runs:
        options = [*parallel, *SHOW_AT_ONCE, f"--session-timeout={limit_min * 60}"]
        paths = [folders[name] for name in names if name in folders]
        if paths and not ("-x" in extra and set(codes) - {0, NOTHING_RAN}):
            codes.append(_pytest(paths, [*options, *extra]))
    ran = [code for code in codes if code != NOTHING_RAN]
    return max(ran, default=NOTHING_RAN)


def _pytest(paths: list[str], extra: list[str]) -> int:
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", f"--rootdir={CHECKOUT}", f"-c{CHECKOUT / 'pyproject.toml'}"]
    return subprocess.run([*command, *paths, *extra], check=False).returncode
