"""The kit for a GPU machine: vLLM's Python without compiled parts runs Triptych's part of an engine's start.

On a made-up H100: what is imported, and what vLLM makes of Triptych's options, is as on a real one.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest
import vllm

from tests.gpu.kit import build
from tests.gpu.kit.figures import summaries
from tests.gpu.kit.vllm_python import STAND_INS, write_archive
from triptych_common.telemetry.span_records import SpanRecord
from triptych_vllm_connector.versions import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parents[3]
TRANSPORT = "triptych.transport"
ENGINE = {"worker": "TriptychGPUWorker", "connector": "TriptychECConnector", "is_v2": True}
PREFILL_DECODE = {
    **ENGINE,
    "scheduler": "parking_scheduler",  # which makes the asynchronous one of this configuration
    "is_async": True,
    "is_encoder_only": False,
    "manager": "PreallocatingEncoderCacheManager",
    "attention": "TRITON_ATTN",
}


@pytest.mark.slow
def test_engines_of_the_kit_resolve_on_an_h100(tmp_path: Path) -> None:
    archive, folder = tmp_path / "vllm-python.zip", tmp_path / "site"
    write_archive(Path(vllm.__file__).parents[1], archive)
    with zipfile.ZipFile(archive) as kit:
        assert not [name for name in kit.namelist() if name.endswith(".so")]
        kit.extractall(folder)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_connector.resolved_on_h100"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report == {
        "on_gpu": True,
        "missing": [],
        "encoder": {
            **ENGINE,
            "scheduler": "Scheduler",
            "is_async": False,
            "is_encoder_only": True,
            "manager": "ForgettingEncoderCacheManager",
            "attention": "TRITON_ATTN",
        },
        "prefill_decode": PREFILL_DECODE,
        "prefill_decode with a tower": PREFILL_DECODE,
    }


def test_the_kit_is_gathered_with_versions_of_the_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is played: it leaves the wheels that it is asked for."""

    def pip(command: str, *arguments: str) -> None:
        (into,) = (
            Path(each.partition("=")[2]) for each in arguments if re.match("--(dest|wheel-dir)=", each)
        )
        if command == "wheel":
            (into / f"{Path(arguments[-1]).name}.whl").touch()
        elif "vllm" in arguments:
            assert build.CONSTRAINTS in arguments
            with zipfile.ZipFile(into / "vllm-0.32.0.whl", "w") as wheel:
                wheel.writestr("vllm/engine.py", "")

    monkeypatch.setattr(build, "pip", pip)
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path)])
    assert build.main() == 0
    members = {each.parent.name for each in ROOT.glob("*/*/pyproject.toml")}
    assert {each.stem for each in (tmp_path / "wheels").iterdir()} == members
    with zipfile.ZipFile(tmp_path / "vllm-python.zip") as kit:
        assert "vllm/engine.py" in kit.namelist()
    pinned = re.findall(r"^vllm==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(pinned) <= set(SUPPORTED_VLLM)
    assert pinned


def test_a_wheel_is_carried_without_compiled_parts_and_under_its_name(tmp_path: Path) -> None:
    wheel, archive = tmp_path / "vllm.whl", tmp_path / "vllm-python.zip"
    names = ("vllm/engine.py", "vllm/_C.abi3.so", "vllm/third_party/deep_gemm/a.py", "vllm/lib/m.cpp")
    with zipfile.ZipFile(wheel, "w") as target:
        for name in (*names, "vllm-0.32.0.dist-info/METADATA", "vllm-0.32.0.dist-info/RECORD"):
            target.writestr(name, name)
    write_archive(wheel, archive)
    with zipfile.ZipFile(archive) as kit:
        assert set(kit.namelist()) == {"vllm/engine.py", "vllm-0.32.0.dist-info/METADATA", *STAND_INS}
        assert kit.read("vllm/engine.py") == b"vllm/engine.py"
        assert b"Version: 0.32.0\n" in kit.read("vllm-0.32.0.dist-info/METADATA")


def test_figures_are_of_each_span_and_transport(tmp_path: Path) -> None:
    kinds = [("a", None), ("b", "cuda_ipc"), ("b", "cuda_ipc"), ("b", "redis")]
    spans = [
        SpanRecord(
            trace_id="0" * 32,
            span_id=f"{number:016x}",
            parent_id=None,
            name=name,
            start_ns=0,
            end_ns=number * 1_000_000,
            status="ok",
            service="s",
            instance="i",
            attributes={} if transport is None else {TRANSPORT: transport},
        )
        for number, (name, transport) in enumerate(kinds)
    ]
    (tmp_path / "i.jsonl").write_bytes(b"".join(orjson.dumps(span) + b"\n" for span in spans))
    found = summaries(tmp_path)
    assert found.keys() == {"a", "b cuda_ipc", "b redis"}
    assert found["b cuda_ipc"] == {"count": 2, "median_ms": 1.5, "longest_ms": 2.0}


def test_what_the_kit_carries_is_pinned() -> None:
    names = [
        line
        for line in (ROOT / "tests/gpu/kit/requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {pin.replace("_", "-").lower() for pin in pins}
    assert len(names) > 50
    assert [name for name in names if name not in pinned] == []
