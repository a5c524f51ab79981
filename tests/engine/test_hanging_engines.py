"""An engine that hangs while its host lives: the service ends by itself, is started again, and serves."""

import concurrent.futures
import contextlib
import signal
from collections.abc import Iterator
from types import ModuleType

import openai
import pytest

from tests.support.real.processes import Part, pids_of, send
from tests.support.real.system import EXACT, System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

ENGINE_TIMEOUT_S = 5
RESTART_LIMIT_S = 300
QUESTION = {"type": "text", "text": "read the digits"}


@pytest.fixture(scope="module")
def hanging_system() -> Iterator[System]:
    options = " ".join(EXACT)
    with running_system(
        f"--encoder-args={options}",
        f"--prefill-decode-args={options}",
        TRIPTYCH_ENGINE_TIMEOUT_S=str(ENGINE_TIMEOUT_S),
        is_forked=True,
    ) as running:
        yield running


def is_back(system: System, name: str) -> bool:
    service = system.services()[name]
    return service["num_restarts"] == 1 and service["state"] == "ready"


@pytest.mark.parametrize("name", ["prefill_decode-0", "encoder-0"])
def test_the_service_is_started_again(hanging_system: System, strips: ModuleType, name: str) -> None:
    first, second = strips.held_out_strips(2, seed=71 + len(name))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        engine = pids_of(hanging_system, name, Part.ENGINE)
        send(engine, signal.SIGSTOP)
        asked = pool.submit(hanging_system.ask, [image_part(first.png), QUESTION])
        wait_until(lambda: is_back(hanging_system, name), RESTART_LIMIT_S, f"{name} is back")
        with contextlib.suppress(openai.APIStatusError):  # alone, it may be back too late for that one
            asked.result()
    assert not set(engine) & set(pids_of(hanging_system, name, Part.ENGINE))
    assert hanging_system.ask([image_part(second.png), QUESTION]).text.strip() == second.digits
    assert "has not answered" in (hanging_system.logs_dir / f"{name}.log").read_text()
