"""Which transport follows one that has failed, for how long, and for which life of the target's agent."""

import pytest

from triptych_common.protocol.messages import FabricEndpoint, FabricTransport, InstanceRecord, Role
from triptych_fabric.sender.links import TransportChoice, incarnation_of

TCP, NIXL = FabricTransport.TCP, FabricTransport.NIXL
ALL = (NIXL, TCP)
Transports = tuple[FabricTransport, ...]


def agent(transports: Transports = ALL, boot_id: str = "first", generation: int = 1) -> InstanceRecord:
    endpoint = FabricEndpoint(host="10.0.0.1", port=7420, generation=generation, transports=transports)
    return InstanceRecord(
        instance="fabric-b", boot_id=boot_id, role=Role.FABRIC, store="store-b", fabric=endpoint
    )


class Choice:
    """Of an agent for the target "b"."""

    def __init__(self, own: Transports = ALL) -> None:
        self.choice = TransportChoice(own)

    def at(self, now: float, record: InstanceRecord | None = None) -> FabricTransport | None:
        return self.choice.choose(record or agent(), now)

    def fail(self, transport: FabricTransport, now: float, record: InstanceRecord | None = None) -> None:
        self.choice.on_failed(incarnation_of(record or agent()), transport, now)

    def num_left(self, now: float) -> int:
        return self.choice.num_left(agent(), now)


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        ((TCP,), (TCP,), TCP),
        ((NIXL, TCP), (TCP, NIXL), NIXL),
        ((NIXL, TCP), (TCP,), TCP),
        ((TCP,), (NIXL,), None),
    ],
)
def test_the_first_that_both_have(
    own: Transports, others: Transports, chosen: FabricTransport | None
) -> None:
    assert Choice(own).at(0.0, agent(others)) is chosen


def test_where_all_have_failed_the_first_of_them_is_tried_again() -> None:
    choice = Choice()
    choice.at(0.0)
    for now, transport in enumerate((TCP, NIXL)):
        choice.fail(transport, float(now))
    assert (choice.at(3.0), choice.num_left(3.0)) == (TCP, 0)
    choice.fail(TCP, 3.0)
    assert choice.at(4.0) is NIXL


@pytest.mark.parametrize("again", [agent(boot_id="second"), agent(generation=2)], ids=["agent", "store"])
def test_another_life_begins_with_the_best(again: InstanceRecord) -> None:
    choice = Choice()
    choice.at(0.0)
    choice.fail(NIXL, 1.0)
    assert choice.at(2.0, again) is NIXL
    choice.fail(NIXL, 3.0)  # a link to the life before, that ends only now
    assert choice.at(3.0, again) is NIXL
