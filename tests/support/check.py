"""`check`: everything about the code that can be checked without engines, two steps at a time.

With `--changed` only what the files that differ from `main` touch: for each change, before each commit.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path, PurePosixPath

from triptych_cli.console import out
from triptych_cli.settings import CHECKOUT

STEP_LIMIT_S = 3600.0
TYPED = ("benchmarks", "tests")
"""Folders whose types are checked, besides the packages."""
QUICK = ("unit", "property", "contract")
"""Layers of tests that `--changed` takes."""
TWO_WORKERS = ("-q", "-n2", "--dist=loadfile", "--hypothesis-profile=dev")

Step = tuple[str, list[str]]  # name, command


def steps() -> list[Step]:
    """Steps over all files, the longest first: name and command."""
    layers = [f"tests/{layer}" for layer in ("unit", "contract")]
    return [
        ("tests", _python("pytest", *TWO_WORKERS, *layers)),
        ("types", _python("mypy", *_packages(), *TYPED)),
        ("imports", [_tool("lint-imports"), "--no-cache"]),
        ("lint", _python("ruff", "check", ".")),
        ("format", _python("ruff", "format", "--check", ".")),
    ]


def steps_for(changed: Sequence[str]) -> list[Step]:
    """Steps over what files touch: their format and lint, types, their tests.

    Types are those of their packages and of everything in `TYPED`: tests use what a changed file has lost.

    Args:
        changed: paths in the checkout.
    """
    python = sorted(each for each in changed if each.endswith(".py"))
    if not python:
        return []
    found = [
        ("lint", _python("ruff", "check", *python)),
        ("format", _python("ruff", "format", "--check", *python)),
    ]
    packages = [each for each in _packages() if any(_is_below(path, each) for path in python)]
    if packages or any(_is_below(path, each) for path in python for each in TYPED):
        found.append(("types", _python("mypy", *packages, *TYPED)))
    if packages:
        found.append(("imports", [_tool("lint-imports"), "--no-cache"]))
    if tests := sorted({each for path in python for each in tests_of(path)}):
        found.append(("tests", _python("pytest", *TWO_WORKERS, "-m", "not long", *tests)))
    return found


def tests_of(path: str) -> list[str]:
    """Tests to run for a changed file: itself, the unit test of the same name, or their nearest folder."""
    parts = PurePosixPath(path).parts
    if parts[0] == "tests" and parts[1] in QUICK and parts[-1].startswith("test_"):
        return [path]
    if len(parts) < 5 or parts[2] != "src":
        return []
    folder = Path("tests", "unit", parts[3].removeprefix("triptych_"), *parts[4:-1])
    same = CHECKOUT / folder / f"test_{parts[-1]}"
    if same.exists():
        return [str(same.relative_to(CHECKOUT))]
    return [str(each) for each in (folder, *folder.parents[:-2]) if (CHECKOUT / each).is_dir()][:1]


def changed_files() -> list[str]:
    """Files that differ from where this branch left `main`, without deleted ones, and new ones."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    differing = _git("diff", "--name-only", "--diff-filter=d", *base)
    return sorted({*differing, *_git("ls-files", "--others", "--exclude-standard")})


def check(only_changed: bool) -> int:
    """Run every step, also after one has failed; 0 when all pass."""
    chosen = steps_for(changed_files()) if only_changed else steps()
    failed = False
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(_run, command): name for name, command in chosen}
        for done in as_completed(running):
            code, output, elapsed_s = done.result()
            failed |= code != 0
            mark = "[green]✓[/]" if code == 0 else "[red]✗[/]"
            out.print(f"{mark} {running[done]:<10} [dim]{elapsed_s:.1f} s[/]")
            if code != 0:
                out.print(output, markup=False, soft_wrap=True)
    return int(failed)


def _run(command: list[str]) -> tuple[int, str, float]:
    start = time.monotonic()
    try:
        result = subprocess.run(
            command, check=False, cwd=CHECKOUT, capture_output=True, text=True, timeout=STEP_LIMIT_S
        )
        code, output = result.returncode, result.stdout + result.stderr
    except subprocess.TimeoutExpired:
        code, output = 1, f"not finished after {STEP_LIMIT_S:.0f} s"
    return code, output, time.monotonic() - start


def _packages() -> list[str]:
    found = chain.from_iterable(
        CHECKOUT.glob(f"{group}/*/src/triptych_*/__init__.py") for group in ("libs", "services")
    )
    return sorted(str(each.parent.relative_to(CHECKOUT)) for each in found)


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], check=False, cwd=CHECKOUT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


if __name__ == "__main__":  # `./triptych check`
    sys.exit(check("--changed" in sys.argv[1:]))
