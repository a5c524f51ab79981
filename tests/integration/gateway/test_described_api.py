"""What `/openapi.json` says, tried with bodies made from it: no 500, and no answer that is not described.

By schemathesis: valid bodies and invalid ones, the same in each run; many more, and new ones, if asked for
(`long`). Faults of the stand-in engine itself become 503, as vLLM's would.
"""

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.system import opened_system

pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 540


@pytest.mark.parametrize(
    "options", [("5",), pytest.param(("50", "--new"), marks=pytest.mark.long)], ids=["few", "many"]
)
async def test_every_operation_answers_as_described(
    redis_url: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    fake = FakePrefillDecode(pools=True)
    async with opened_system(redis_url, tmp_path, fake, files_dir=tmp_path / "files") as system:
        url = system.gateway.settings.local_urls[0]
        command = [sys.executable, "-m", "tests.support.gateway.described_api", url, *options]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        description = (await system.http.get("/openapi.json")).json()
        assert int(done.stdout.split()[-1]) == sum(len(methods) for methods in description["paths"].values())
        assert fake.bodies, "some of them are valid"
