"""Tries what a gateway says of its API with bodies made from that, by schemathesis.

    python -m tests.support.gateway.described_api URL EXAMPLES [--new]

A process of its own: hypothesis makes values of constants that it finds in the modules that happen to be
imported, so within a run of many tests it would be other bodies each time. With `--new` they are.
"""

import sys
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

TIMEOUT_S = 60  # for an answer, on a machine that does other things as well
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


def check_all(base_url: str, num_examples: int, *, is_new: bool) -> int:
    """Returns the number of operations that were tried, with `num_examples` of each mode.

    Raises:
        AssertionError: one was answered with 500.
        schemathesis.core.failures.FailureGroup: one was answered as it is not described.
    """
    with requests.Session() as session:
        session.trust_env = False  # this machine alone: no proxy
        session.headers["Connection"] = "close"  # an idle one may be closed just when a request is sent
        description = session.get(f"{base_url}/openapi.json", timeout=TIMEOUT_S).json()
        schema = schemathesis.openapi.from_dict(description)
        found: list[Any] = list(schema.get_all_operations())
        operations = [each.ok() for each in found]
        chosen = settings(
            max_examples=num_examples,
            derandomize=not is_new,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for operation in operations:
            for mode in MODES:
                check_operation(operation, mode, base_url, session, chosen)
    return len(operations)


def check_operation(
    operation: Any, mode: Any, base_url: str, session: requests.Session, chosen: settings
) -> None:
    checks = [
        schemathesis.checks.CHECKS.get_one(name)
        for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]

    @chosen
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


if __name__ == "__main__":
    url, number, *options = sys.argv[1:]
    print(check_all(url, int(number), is_new="--new" in options))
