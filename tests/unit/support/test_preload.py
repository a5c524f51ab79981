"""A process is forked only if it would have been imported in the same way."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real.warm import preload

MODULE = "a_module_that_reads_the_environment"


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[preload.Preloaded]:
    (tmp_path / f"{MODULE}.py").write_text(
        'import os\nREAD = os.environ.get("READ"), os.getenv("NOT_THERE")\nos.environ["SET"] = "1"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preload, "MODULES", (MODULE,))
    monkeypatch.setenv("READ", "1")
    monkeypatch.setenv("NOT_READ", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SET", "0")
    yield preload.Preloaded()
    del sys.modules[MODULE]


def differing(preloaded: preload.Preloaded, module: str = "triptych_encoder", **changed: str) -> list[str]:
    return preloaded.differing(module, {**os.environ, **changed})


def test_what_was_read_must_be_equal(preloaded: preload.Preloaded) -> None:
    assert differing(preloaded) == []
    assert differing(preloaded, READ="2", NOT_THERE="1") == ["NOT_THERE", "READ"]


def test_what_was_not_read_may_be_another(preloaded: preload.Preloaded) -> None:
    assert differing(preloaded, NOT_READ="2", NEW="1") == []


def test_what_libraries_read_must_be_equal(preloaded: preload.Preloaded) -> None:
    assert differing(preloaded, OMP_NUM_THREADS="2", LD_PRELOAD="x.so") == ["LD_PRELOAD", "OMP_NUM_THREADS"]


def test_the_launcher_computes_nothing(preloaded: preload.Preloaded) -> None:
    assert differing(preloaded, preload.LAUNCHER, OMP_NUM_THREADS="2", READ="2") == []
    assert differing(preloaded, preload.LAUNCHER, PYTHONPATH="elsewhere") == ["PYTHONPATH"]


def test_what_imports_set_is_known(preloaded: preload.Preloaded) -> None:
    assert preloaded.changes == {"SET": "1"}
