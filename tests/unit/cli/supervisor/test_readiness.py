"""Whose record in the registry makes a service ready."""

import time

import pytest

from triptych_cli.supervisor import readiness
from triptych_cli.supervisor.readiness import RegistryProbe
from triptych_common.protocol.messages import InstanceRecord, Role


class Answers:
    """Call it to set which boots of `one` Redis lists from now on; None: it does not answer."""

    def __call__(self, *boots: str | None) -> None:
        self._boots = boots

    async def list_instances(self) -> list[InstanceRecord] | None:
        if None in self._boots:
            return None
        return [
            InstanceRecord(instance=name, boot_id=boot, role=Role.ENCODE)
            for boot in self._boots
            if boot is not None
            for name in ("one", "two")
        ]

    async def probe(self) -> RegistryProbe:
        return await RegistryProbe.before_start(self.list_instances, "one")


@pytest.fixture
def answers() -> Answers:
    return Answers()


async def test_the_record_of_the_life_before_does_not_count(answers: Answers) -> None:
    answers("old")
    registered = await answers.probe()
    assert not await registered.is_met()
    answers(None)
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_nor_does_it_when_redis_answers_after_the_start_only(answers: Answers) -> None:
    answers(None)
    registered = await answers.probe()
    assert not await registered.is_met()
    answers("old")
    assert not await registered.is_met()
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_a_first_answer_without_a_record_makes_the_next_one_count(answers: Answers) -> None:
    answers(None)
    registered = await answers.probe()
    answers()
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_a_record_that_outlives_its_time_to_live_is_of_a_living_process(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answers(None)
    registered = await answers.probe()
    answers("quick")  # it had registered before the first answer
    assert not await registered.is_met()
    now += readiness.OLD_RECORD_S
    assert not await registered.is_met()
    now += 0.1
    assert await registered.is_met()
