"""Tests of what may differ, over the published Python source of each other supported version of vLLM.

It runs with the kernels and the torch that are installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.vllm_seams.source import SourceUnavailableError, runnable
from triptych_vllm_connector.versions import SUPPORTED_VLLM, vllm_version

ROOT = Path(__file__).parents[4]
TESTS = (
    "tests/integration/vllm_connector/seams/test_seams.py",
    "tests/unit/vllm_connector/host/test_kv_transfer.py",
    "tests/unit/vllm_connector/plain/test_options.py",
    "tests/unit/vllm_connector/records",
    "tests/unit/vllm_connector/scheduler",
    "tests/unit/vllm_connector/seams",
    "tests/unit/prefill_decode/test_body_shapes.py::test_every_field_of_vllms_is_known",
    "--ignore=tests/unit/vllm_connector/records/test_item_fields.py",  # of the sources of all versions
)
"""Tests that take vLLM's own classes in hand, of a few seconds in all."""
OTHERS = [release for release in SUPPORTED_VLLM if release != vllm_version()]


@pytest.mark.slow
@pytest.mark.parametrize("release", OTHERS)
def test_it_runs_over_the_source_of_the_version(release: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    try:
        with runnable(release) as folder:
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT
            )
    except SourceUnavailableError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
