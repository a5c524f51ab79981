"""What members of the repository need from outside, as pip requirements: one line each, on stdout.

    python requirements.py ROOT 'encoder[cpu]' 'prefill_decode[cpu]'

Run while images are built. The layers with the packages from outside depend on its output alone, so a
change of our own code does not install them again. Standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

_OURS = re.compile(r"triptych[-_](?P<name>[a-z0-9_-]+)(\[(?P<extras>[a-z0-9_,\s-]*)\])?")


def outside_requirements(root: Path, wanted: list[str]) -> list[str]:
    """Requirements of the members in `wanted` (folder names, with extras) and of those they stand on."""
    projects = _projects(root)
    to_visit = [f"triptych-{each}" for each in wanted]
    seen: set[str] = set()
    found: set[str] = set()
    while to_visit:
        requirement = to_visit.pop()
        ours = _OURS.match(requirement)
        if ours is None:
            found.add(requirement)
        elif requirement not in seen:
            seen.add(requirement)
            project = projects[ours["name"].replace("_", "-")]
            to_visit += project.get("dependencies", [])
            for extra in filter(None, map(str.strip, (ours["extras"] or "").split(","))):
                to_visit += project["optional-dependencies"][extra]
    return sorted(found)


def _projects(root: Path) -> dict[str, dict[str, Any]]:
    """`[project]` of each member, by its name without `triptych-`."""
    tables = [tomllib.loads(file.read_text())["project"] for file in root.glob("*/*/pyproject.toml")]
    return {table["name"].removeprefix("triptych-"): table for table in tables}


if __name__ == "__main__":
    sys.stdout.write("".join(f"{each}\n" for each in outside_requirements(Path(sys.argv[1]), sys.argv[2:])))
