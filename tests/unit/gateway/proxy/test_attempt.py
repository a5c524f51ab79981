"""Which variant a request with media goes to when its own has left."""

from types import SimpleNamespace
from typing import Any

from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.access.auth import ANONYMOUS
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.proxy.context import RequestContext
from triptych_gateway.proxy.multimodal_request import MultimodalRequest
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.variants import VariantReason
from triptych_gateway.settings import RoutingSettings


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
    instances = Instances(view, Router(2.0), RoutingSettings(instance_grace_s=1.0, max_dispatch_attempts=2))
    request: Any = SimpleNamespace(model="m", endpoint=CHAT, body={}, media=(None,))
    arrived = RequestContext(RequestId("r"), ANONYMOUS, nothing, 0.0, float("inf"))
    services: Any = SimpleNamespace(media=None, instances=instances)
    client: Any = SimpleNamespace(has_begun=False)
    context = arrived.moved_to(view.variants_of("m")[0])
    life = MultimodalRequest(services, request, context, nothing, client)
    versions = ["1"]
    while (another := life._another_variant()) is not None:
        life._context = life._context.moved_to(another)
        versions.append(another.version or "")
        assert life._context.variant_reason is VariantReason.LEFT
    assert sorted(versions) == ["1", "2", "3"]
