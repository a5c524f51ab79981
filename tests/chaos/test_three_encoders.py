"""Three encoders, one killed in the middle of its jobs: every request succeeds, some a lease later."""

import asyncio
from statistics import median

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Client, Question, ask_all
from tests.support.fast.faults import Faults
from tests.support.fast.layout import Layout
from tests.support.fast.processes.points import SENDING
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.fast.system import FastSystem
from triptych_encoder.settings import EncoderSettings

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_QUESTIONS = 12  # as many as three encoders have slots
LEASE_MS = EncoderSettings.model_fields["takeover_idle_ms"].default


def test_the_lease_is_two_seconds_at_most() -> None:
    assert LEASE_MS <= 2000


@pytest.mark.parametrize(
    "system", [Layout(num_encoders=3, takeover_idle_ms=LEASE_MS, encode_s=0.3)], indirect=True
)
async def test_one_is_killed_in_the_middle_of_its_jobs(system: FastSystem, faults: Faults) -> None:
    quiet = [Question(f"quiet {n}", (png(n),)) for n in range(NUM_QUESTIONS)]
    shaken = [Question(f"shaken {n}", (png(100 + n),)) for n in range(NUM_QUESTIONS)]
    killed: list[str] = []

    def kill_for_good(instance: str) -> None:
        killed.append(instance)
        system.hold_down(instance)  # not even its own restart helps
        faults.kill(instance)

    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        before = await ask_all(client, quiet)
        with faults.at("seal", SENDING, kill_for_good):
            after = await ask_all(client, shaken)
    (victim,) = killed
    system.let_up(victim)
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)
    check([*before, *after], more=system.log_ends())
    num_encodes = system.tally().num_encodes
    assert max(num_encodes.values()) == 2, str(num_encodes)  # a job was taken over, none twice
    assert len(num_encodes) == 2 * NUM_QUESTIONS
    usual_s = median(answer.elapsed_s for answer in before)
    delays = sorted(round(answer.elapsed_s - usual_s, 2) for answer in after)
    num_taken_over = sum(1 for number in num_encodes.values() if number == 2)
    print(f"{num_taken_over} jobs of {NUM_QUESTIONS} were taken over; added seconds: {delays}")
