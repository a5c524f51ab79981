"""The bounds on images rest on how Pillow reads headers: no member may be installed beside an older one."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])


def requirements(member: Path) -> list[str]:
    project = tomllib.loads(member.read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(each for extra in extras for each in extra)]


def test_the_floor_is_the_release_that_was_tried() -> None:
    declared = {
        requirement
        for member in MEMBERS
        for requirement in requirements(member)
        if re.match(r"pillow\b", requirement, re.IGNORECASE)
    }
    pinned = re.search(r"^pillow==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert declared == {f"pillow>={pinned[1].split('.')[0]}"}
    assert version("pillow").split(".")[0] == pinned[1].split(".")[0]
