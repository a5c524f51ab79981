"""The walk over our code finds what a version of vLLM lacks (`tests.support.vllm_seams`)."""

from pathlib import Path

import pytest

from tests.support.vllm_seams import uses as walk
from tests.support.vllm_seams.symbols import Tree

VLLM = {
    "pool.py": "class Pool:\n    def __init__(self, size: int):\n        self.free = size\n",
    "engine.py": """
from dataclasses import dataclass
from .pool import Pool
@dataclass
class Config:
    max_steps: int
class Engine:
    config: Config
    def __init__(self, config: Config):
        self.config = config
        self.pool = Pool(3)
    def step(self, tokens: int, *, late: bool = False) -> None: ...
    def run(self): self.step(1)
""",
}
OURS = "libs/vllm_connector/src/triptych_vllm_connector"


@pytest.fixture
def faults_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Faults in a text of ours, over a small vLLM."""
    monkeypatch.setattr(walk, "ROLES", {"engine": "vllm.engine.Engine"})
    monkeypatch.setattr(walk, "BASES", {})
    for name, text in VLLM.items():
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / OURS / "seams").mkdir(parents=True)
    (tmp_path / OURS / "seams" / "vllm_0_33.py").write_text("from vllm.engine import Engine as Runner\n")
    (tmp_path / OURS / "seams" / "vllm_0_32.py").write_text("from vllm.gone import Engine as Runner\n")

    def find(text: str) -> list[str]:
        (tmp_path / OURS / "ours.py").write_text(text)
        found = walk.find_uses(Tree(tmp_path / "vllm"), tmp_path, "0.33.0")
        return [fault.partition(": ")[2] for fault in found.faults] + found.assignments

    return find


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from vllm.engine import Motor", "vllm.engine.Motor does not exist"),
        ("def f(engine): engine.pool.used", "Pool has no used"),
        ("def f(engine): engine.config.max_tokens", "Config has no max_tokens"),
        ("def f(engine):\n    pool = engine.pool\n    pool.used", "Pool has no used"),
        ("def f(engine): engine.step()", "engine.step: missing ['tokens']"),
        ("def f(engine): engine.step(1, soon=True)", "engine.step: no parameter ['soon']"),
        ("from vllm.engine import Config\nConfig(steps=1)", "Config has no field steps"),
        (
            "from vllm.engine import Engine\nclass Ours(Engine):\n    def step(self, tokens): ...",
            "Ours.step over Engine: does not take ['late']",
        ),
        (
            """from vllm.engine import Engine
class Mixin:
    def go(self): super().walk()
class Ours(Mixin, Engine): ...""",
            "self.walk is in none of ['Engine']",
        ),
        (
            "from triptych_vllm_connector.seams.current import seam\nseam.Runner.halt",
            "Engine has no halt",
        ),
        (
            "from vllm.engine import Engine\nreplace(Engine, 'step', None, used_by=(Engine.step,))",
            "Engine.step does not use ['step']",
        ),
    ],
)  # fmt: skip
def test_what_a_version_lacks_is_found(faults_of: object, text: str, fault: str) -> None:
    assert faults_of(text) == [fault]  # type: ignore[operator]


def test_what_a_version_has_is_no_fault(faults_of: object) -> None:
    text = """
from vllm.engine import Config, Engine
class Ours(Engine):
    own = 1
    def step(self, tokens, *, late=False): super().step(tokens, late=late); self.own, self.pool.free
def f(engine, config: Config, other):
    engine.step(1); config.max_steps; other.anything; engine.triptych_added
replace(Engine, "step", None, used_by=(Engine.run,))
"""
    assert faults_of(text) == []  # type: ignore[operator]


def test_an_assignment_to_a_part_of_vllm_is_found(faults_of: object) -> None:
    found = faults_of("from vllm import engine\nengine.Engine = None")  # type: ignore[operator]
    assert [each.rpartition(" ")[2] for each in found] == ["engine.Engine"]
