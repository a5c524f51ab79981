"""`test`: runs pytest over the layers of tests/.

Tests marked `long` take minutes each and run when asked for: with `--long`, or by their file. Several files
run at a time of the layers without engines, which come first, and several tests of the chaos layer, which
comes last: many of them wait for most of their time. A failure is shown when it happens; the end shows where
the time went and what was skipped. Each test has a limit (`timeout` in pyproject.toml), and a run ends when
nothing has moved for longer than that (`tests/support/janitor.py`): a slow machine meets neither.
"""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rich.markup import escape

from triptych_cli.console import fail, out, plain_table
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
FIRST = ("property", "integration", "unit", "contract")  # small files last: workers end together
LAST = ("chaos",)
FOUR_FILES_AT_A_TIME = ["-n4", "--dist=loadfile", "--no-loadscope-reorder"]
FOUR_TESTS_AT_A_TIME = ["-n4", "--dist=worksteal"]  # of large files, whose system starts in seconds
SHOW_AT_ONCE = ["--instafail", "--tb=short"]
NOTHING_RAN = 5  # pytest's exit code
NUM_SLOWEST = 10


class Ran(NamedTuple):
    """One test, as pytest's JUnit report has it."""

    layer: str
    name: str
    seconds: float  # with its fixtures
    skipped: str  # the reason; empty for a test that ran

    @classmethod
    def of(cls, case: ET.Element) -> Self:
        module, name = case.get("classname", ""), case.get("name", "")
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message") or "no reason"
        path = module.removeprefix("tests.").replace(".", "/")
        return cls(path.partition("/")[0], f"{path}.py::{name}", float(case.get("time", 0)), reason)


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
    elapsed_s: dict[str, float] = {}
    ran: list[Ran] = []
    runs: tuple[tuple[Sequence[str], list[str]], ...] = (
        (FIRST, FOUR_FILES_AT_A_TIME),
        (rest, []),
        (LAST, FOUR_TESTS_AT_A_TIME),
    )
    with tempfile.TemporaryDirectory(prefix="triptych-test-") as folder:
        for names, parallel in runs:
            names = [name for name in names if name in folders]
            if not names or ("-x" in extra and set(codes) - {0, NOTHING_RAN}):
                continue
            report = Path(folder) / f"{names[0]}.xml"
            options = [*parallel, *SHOW_AT_ONCE, f"--junitxml={report}"]
            start = time.monotonic()
            codes.append(_pytest([folders[name] for name in names], [*options, *extra]))
            elapsed_s[", ".join(names)] = time.monotonic() - start
            if report.exists():
                ran += map(Ran.of, ET.parse(report).iter("testcase"))
    summarize(ran, elapsed_s)
    return max((code for code in codes if code != NOTHING_RAN), default=NOTHING_RAN)


def _pytest(paths: list[str], extra: list[str]) -> int:
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", f"--rootdir={CHECKOUT}", f"-c{CHECKOUT / 'pyproject.toml'}"]
    return subprocess.run([*command, *paths, *extra], check=False).returncode


def summarize(ran: Iterable[Ran], elapsed_s: dict[str, float]) -> None:
    """Print the time of each layer, the slowest tests, and the reasons of skipped ones.

    Args:
        elapsed_s: wall-clock time of each run of pytest, by the names of its layers.
    """
    ran = list(ran)
    if not ran:
        return
    layers = plain_table("layer", "tests", "seconds", right=("tests", "seconds"))
    for layer in [name for name in LAYERS if any(each.layer == name for each in ran)]:
        seconds = [each.seconds for each in ran if each.layer == layer and not each.skipped]
        layers.add_row(layer, str(len(seconds)), f"{sum(seconds):.0f}")
    out.print(layers)
    for names, wall_s in elapsed_s.items():
        out.print(f"{names}: {wall_s:.0f} s by the clock", markup=False)
    slowest = plain_table("seconds", "slowest tests", right=("seconds",))
    for each in sorted(ran, key=lambda each: -each.seconds)[:NUM_SLOWEST]:
        slowest.add_row(f"{each.seconds:.1f}", escape(each.name))
    out.print(slowest)
    skipped = Counter(each.skipped for each in ran if each.skipped)
    if skipped:
        reasons = plain_table("skipped", "reason", right=("skipped",))
        for reason, count in skipped.most_common():
            reasons.add_row(str(count), escape(reason))
        out.print(reasons)


if __name__ == "__main__":  # `./triptych test`: a layer, perhaps "" for all, and arguments of pytest
    sys.exit(run_tests(sys.argv[1] or None, sys.argv[2:]))
