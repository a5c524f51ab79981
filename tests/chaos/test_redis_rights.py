"""The whole system as a user of Redis that has exactly the rights that are documented."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.support.fast.client import Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.layout import DEPLOYMENT, Layout
from tests.support.fast.processes.points import SENDING
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S, Action, Scenario, points_of
from tests.support.fast.system import FastSystem
from tests.support.faults.redis_pair import raw
from tests.support.protocol_steps import Party
from triptych_common.redis_client.rights import rules

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PASSWORD = "open-sesame"


class AsUser:
    """A Redis that a system knows as its user `triptych`."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.start, self.stop, self.freeze, self.thaw = server.start, server.stop, server.freeze, server.thaw
        self.url = server.url.replace("unix://", f"unix://triptych:{PASSWORD}@")


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with embedded_redis() as running:
        with raw(running) as client:
            user = ("ACL", "SETUSER", "triptych", "reset", "on", f">{PASSWORD}", *rules(DEPLOYMENT))
            client.execute_command(*user)
        yield running


async def test_everything_works_and_nothing_is_refused(server: EmbeddedRedis) -> None:
    """Also when an encoder is killed in the middle of a job."""
    with FastSystem(AsUser(server), Layout()) as system:
        with closing(Faults(system)) as faults:
            async with Client(system.url(), CLIENT_LIMIT_S) as client:
                for question in (
                    Question("text"),
                    Question("image", (png(1), png(2, 12))),
                    Question("again", (png(1),)),
                ):
                    answer = await client.ask(question)
                    assert answer.is_right, f"{answer}\n{system.log_ends()}"
            point = next(point for point in points_of(Party.ENCODER) if str(point) == f"seal.{SENDING}")
            case = await Scenario(system, faults).run(point, Party.ENCODER, Action.KILL)
        assert all(answer.is_right for answer in case.answers), str(case)
        await asyncio.to_thread(system.wait_until_idle)
    with raw(server) as client:
        refused = client.acl_log()
    # Connections of services have names; those with which the test reads the streams have none.
    assert [each for each in refused if each["client-info"]["name"]] == []
