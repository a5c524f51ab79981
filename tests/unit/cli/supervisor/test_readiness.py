"""Whose record in the registry makes a service ready."""

from collections.abc import Callable

import pytest

from triptych_cli.supervisor import readiness
from triptych_cli.supervisor.readiness import RegistryProbe
from triptych_common.protocol.messages import InstanceRecord, Role

Answers = Callable[..., None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Set which boots of `one` Redis lists from now on; None: it does not answer."""

    def answer(*boots: str | None) -> None:
        records = [
            InstanceRecord(instance=name, boot_id=boot, role=Role.ENCODE)
            for boot in boots
            if boot is not None
            for name in ("one", "two")
        ]

        async def list_instances(url: str, deployment: str) -> list[InstanceRecord] | None:
            return None if None in boots else records

        monkeypatch.setattr(readiness, "list_instances", list_instances)

    return answer


async def probe() -> RegistryProbe:
    return await RegistryProbe.before_start("redis://x", "default", "one")


async def test_the_record_of_the_life_before_does_not_count(answers: Answers) -> None:
    answers("old")
    registered = await probe()
    assert not await registered.is_met()
    answers(None)
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_nor_does_it_when_redis_answers_after_the_start_only(answers: Answers) -> None:
    answers(None)
    registered = await probe()
    assert not await registered.is_met()
    answers("old")
    assert not await registered.is_met()
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_a_first_answer_without_a_record_makes_the_next_one_count(answers: Answers) -> None:
    answers(None)
    registered = await probe()
    answers()
    assert not await registered.is_met()
    answers("new")
    assert await registered.is_met()


async def test_a_record_that_outlives_its_time_to_live_is_of_a_living_process(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(readiness.time, "monotonic", lambda: now)
    answers(None)
    registered = await probe()
    answers("quick")  # it had registered before the first answer
    assert not await registered.is_met()
    now += readiness.OLD_RECORD_S
    assert not await registered.is_met()
    now += 0.1
    assert await registered.is_met()
