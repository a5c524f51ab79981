"""Checks a release of vLLM, or runs a command over its Python source.

python -m tests.support.vllm_seams faults 0.34.0            what of our uses does not fit it
python -m tests.support.vllm_seams changed 0.33.0 0.34.0    functions that we use and that changed, as diffs
python -m tests.support.vllm_seams run 0.34.0 -- pytest …   with its Python source and the installed kernels
"""

import argparse
import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path

from tests.support.vllm_seams.source import published_source, runnable
from tests.support.vllm_seams.symbols import Definition, Tree
from tests.support.vllm_seams.uses import Uses, find_uses

ROOT = Path(__file__).parents[3]


def uses_of(release: str) -> Uses:
    return find_uses(Tree(published_source(release)), ROOT, release)


def print_changed(old: str, new: str) -> None:
    before, after = uses_of(old).functions, uses_of(new).functions
    for name in sorted(before):
        if name not in after:
            print(f"{name}: is not there, or not found by the same way")
            continue
        lines = list(difflib.unified_diff(_lines(before[name]), _lines(after[name]), old, new, lineterm=""))
        if lines:
            print(f"{name}:", *lines, sep="\n")


def _lines(function: Definition) -> list[str]:
    return [] if function.node is None else ast.unparse(function.node).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=("faults", "changed", "run"))
    parser.add_argument("releases", nargs="+")
    arguments = sys.argv[1:]
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    args = parser.parse_args(arguments[: arguments.index("--")] if command else arguments)
    if args.action == "faults":
        faults = uses_of(args.releases[0]).faults
        print(*faults, sep="\n")
        return 1 if faults else 0
    if args.action == "changed":
        print_changed(*args.releases)
        return 0
    with runnable(args.releases[0]) as folder:
        return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(folder)}).returncode


if __name__ == "__main__":
    sys.exit(main())
