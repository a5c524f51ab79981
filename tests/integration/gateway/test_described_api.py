"""What `/openapi.json` says, tried with bodies made from it: no 500, and no answer that is not described.

By schemathesis: valid bodies and invalid ones, the same in each run. Faults of the stand-in engine itself
become 503, as vLLM's would.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.system import opened_system

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

NUM_EXAMPLES = 5  # of each operation and mode
TIMEOUT_S = 20


async def test_every_operation_answers_as_described(redis_url: str, tmp_path: Path) -> None:
    fake = FakePrefillDecode(pools=True)
    async with opened_system(redis_url, tmp_path, fake, files_dir=tmp_path / "files") as system:
        description = (await system.http.get("/openapi.json")).json()
        operations = await asyncio.to_thread(check_all, description, system.gateway.settings.local_url)
        assert operations == sum(len(methods) for methods in description["paths"].values())
        assert fake.bodies, "some of them are valid"
        await system.assert_idle()


def check_all(description: dict[str, Any], base_url: str) -> int:
    """The number of operations that were tried."""
    schema = schemathesis.openapi.from_dict(description)
    operations = [found.ok() for found in schema.get_all_operations()]
    with requests.Session() as session:
        session.trust_env = False  # this machine alone: no proxy
        for operation in operations:
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                check_operation(operation, mode, base_url, session)
    return len(operations)


def check_operation(operation: Any, mode: Any, base_url: str, session: requests.Session) -> None:
    checks = [
        schemathesis.checks.CHECKS.get_one(name)
        for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(base_url=base_url, session=session, timeout=TIMEOUT_S)
        assert response.status_code != 500, f"{case.as_curl_command()}\n{response.text}"
        case.validate_response(response, checks=checks)

    try:
        check()
    except Exception as error:
        if type(error).__name__ != "Unsatisfiable":  # an operation that has no invalid form
            raise
