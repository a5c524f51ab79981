"""What is known of instances that the registry has lost for a moment."""

from typing import Any

from tests.support.gateway.routing import record_of
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.registry_view import FORGET_S, RegistryView


class Records:
    """`Registry`."""

    def __init__(self, *records: InstanceRecord) -> None:
        self.records = list(records)

    async def list_instances(self) -> list[InstanceRecord]:
        return self.records


async def test_an_empty_registry_makes_nothing_forgotten_for_a_minute() -> None:
    registry: Any = Records(record_of("a"), record_of("b"))
    view = RegistryView(registry, 1.0)
    await view.refresh()
    assert view.seen_lately(100.0) == {"a", "b"}
    registry.records = []
    await view.refresh()
    assert view.records == ()
    assert view.seen_lately(100.0 + 0.9 * FORGET_S) == {"a", "b"}
    registry.records = [record_of("b")]
    await view.refresh()
    assert view.seen_lately(100.0 + 0.95 * FORGET_S) == {"a", "b"}
    assert view.seen_lately(100.0 + FORGET_S) == {"b"}
