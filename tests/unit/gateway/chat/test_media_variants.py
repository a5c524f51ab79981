"""Which variant a request with media goes to when its own has left."""

from types import SimpleNamespace
from typing import Any

from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.access.callers import ANONYMOUS
from triptych_gateway.chat.dispatch import Arrival
from triptych_gateway.chat.media_variants import another_variant, moved_to
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.variants import VariantReason


def test_it_does_not_come_back_to_one_that_it_has_left() -> None:
    nothing: Any = None
    view = RegistryView(nothing, 1.0)
    view.records = tuple(
        InstanceRecord(
            instance=f"epd-{version}",
            boot_id="b",
            role=Role.ENCODE_PREFILL_DECODE,
            url="http://x",
            model="m",
            model_version=version,
            namespace_digest=version * 64,
        )
        for version in "123"
    )
    instances = Instances(view, Router(2.0), 1.0, 2)
    request: Any = SimpleNamespace(model="m", endpoint=CHAT, body={}, media=(None,))
    arrival = moved_to(view.variants_of("m")[0], Arrival(RequestId("r"), ANONYMOUS, nothing, 0.0, 0.0))
    versions = ["1"]
    while (another := another_variant(instances, request, arrival)) is not None:
        arrival = moved_to(another, arrival)
        versions.append(another.version or "")
        assert arrival.variant_reason is VariantReason.LEFT
    assert sorted(versions) == ["1", "2", "3"]
