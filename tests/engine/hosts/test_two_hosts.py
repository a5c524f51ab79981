"""Real engines, the encoder on another host than prefill_decode: the answers of a monolith, in one trace."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.real import RealHosts, running_real_hosts
from tests.support.real.system import Server, image_part
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

QUESTION = {"type": "text", "text": "read the digits"}
ONE_HOSTS_SPANS = ("encoder.encode", "encoder.write", "prefill.inject")
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[RealHosts]:
    require_namespaces()
    with running_real_hosts() as running:
        yield running


def test_answers_are_exact(hosts: RealHosts, monolith: Server, strips: ModuleType) -> None:
    samples = strips.held_out_strips(6, length=None, seed=161)
    for number, (first, second) in enumerate(zip(samples[::2], samples[1::2], strict=True)):
        for content in (
            [image_part(first.png), QUESTION],
            [image_part(first.png), QUESTION, image_part(second.png)],
        ):
            answer = hosts.ask(content, stream=bool(number % 2))
            assert answer.token_ids == monolith.ask(content).token_ids
    wait_until(lambda: not hosts.leftovers(), LIMIT_S, "nothing is reserved or pinned on either host")


def test_one_trace_tells_of_the_transfer(hosts: RealHosts, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=162)
    answer = hosts.ask([image_part(strip.png), QUESTION])
    spans = hosts.trace(answer.request_id, *ONE_HOSTS_SPANS, "gateway.transfer")
    assert len({span.trace_id for span in spans}) == 1
    (transfer,) = [span for span in spans if span.name == "gateway.transfer"]
    assert transfer.attributes["triptych.source"] == "store-a"
    assert transfer.attributes["triptych.target"] == "store-b"
    assert transfer.attributes["triptych.transport"] == "tcp"
    assert int(transfer.attributes["triptych.num_bytes"]) > 0
    assert int(transfer.attributes["triptych.bytes_per_s"]) > 0
