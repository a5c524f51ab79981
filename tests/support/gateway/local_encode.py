"""Local encodes: an instance with a vision tower, and no encoder."""

from collections.abc import Callable, Mapping

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.system import System
from triptych_common.protocol.messages import Compute, InstanceRecord, Modality, Role, Sharing

ANSWER = "1x8x8 word0 word1 word2"  # for one image of `image_bytes` in front of a text
QUICK = {"encoder_grace_s": 0.2, "local_encode_after_s": 0.3}


async def tower(
    system: System,
    name: str = "pd-tower",
    store: str | None = None,
    item_limits: Mapping[Modality, int] | None = None,
) -> FakePrefillDecode:
    """An instance that can encode, and the gateway knows it. `item_limits` None: it says nothing of them."""
    instance = FakePrefillDecode(
        name,
        role=Role.ENCODE_PREFILL_DECODE,
        stores_responses=system.prefill_decode.stores_responses,
        store=store,
        item_limits=dict(item_limits or {}),
    )
    await system.stack.enter_async_context(instance.running(system.bus))
    await system.refresh()
    return instance


async def without_encoders(system: System) -> None:
    """From now on the gateway sees no encoder."""
    await _seen(system, lambda record: None if record.role is Role.ENCODE else record)


async def on_shared_cores(system: System) -> None:
    """From now on the gateway sees all instances compute on the same cores."""
    compute = Compute(sharing=Sharing.CORES)
    await _seen(system, lambda record: record.model_copy(update={"compute": compute}))


async def _seen(system: System, seen_as: Callable[[InstanceRecord], InstanceRecord | None]) -> None:
    look = system.gateway.view._registry.list_instances

    async def list_instances() -> list[InstanceRecord]:
        return [seen for record in await look() if (seen := seen_as(record)) is not None]

    system.gateway.view._registry.list_instances = list_instances  # type: ignore[method-assign]
    await system.refresh()
