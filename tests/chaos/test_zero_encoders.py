"""The last encoder leaves while a request arrives: the request waits for the next one.

By real encoders whose vLLM is stood in for; the same with fakes is in tests/integration/gateway/encode.
"""

import asyncio
import signal

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.layout import Layout
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_ROUNDS = 20
NUM_TEXTS = 3
LIMIT_S = 30.0
ENCODER = "encoder-0"
LAYOUT = Layout(
    num_encoders=1,
    num_prefill_decodes=1,
    first_token_timeout_s=60.0,
    options={Party.GATEWAY: ("--encoders-on-demand", "--encoder-grace-s=60")},
)


@pytest.mark.parametrize("system", [LAYOUT], indirect=True)
async def test_no_request_is_lost_when_the_last_encoder_leaves_as_it_arrives(system: FastSystem) -> None:
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        for number in range(NUM_ROUNDS):
            system.hold_down(ENCODER)
            before, after = (Question(f"{number} {side}", (png(2 * number + side),)) for side in (0, 1))
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(client.ask(before))]
                if number % 2:
                    await asyncio.to_thread(_wait_until_encoding, system)
                system.services[ENCODER].send(signal.SIGTERM)  # it drains
                asked.append(group.create_task(client.ask(after)))
                texts = [
                    group.create_task(client.ask(Question(f"text {number} {each}", ())))
                    for each in range(NUM_TEXTS)
                ]
                await asyncio.to_thread(_wait_until_gone, system)
                texts.append(group.create_task(client.ask(Question(f"text {number}", ()))))
                check([await each for each in texts], more=system.log_ends())  # without any encoder
                system.let_up(ENCODER)
            check([each.result() for each in asked], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)


def _wait_until_encoding(system: FastSystem) -> None:
    system.wait_until(lambda: system.store_stats().num_reservations > 0, LIMIT_S, "its image is encoded")


def _wait_until_gone(system: FastSystem) -> None:
    service = system.services[ENCODER]
    system.wait_until(lambda: service.exit_code is not None, LIMIT_S, "the encoder has ended")
