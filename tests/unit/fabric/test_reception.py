"""One offer's way into the store, and what ends with it."""

from types import SimpleNamespace
from typing import Any, cast

from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_fabric.receiver.reception import ByteBudget, Reception
from triptych_fabric.transports.transport import Sink
from triptych_fabric.wire.frames import FrameKind, Offer, OfferFailed

OFFER = Offer(
    mm_hash="ab" * 32,
    spec=TensorSpec(shape=(1, 1), dtype="float32", num_bytes=4),
    is_sealed=True,
    encode_class=EncodeClass.BATCH,
    remaining_ms=60_000,
)


class FaultyStore:
    """Has a fault where it reserves."""

    mapping = SimpleNamespace(num_bytes=1 << 20)

    async def reserve(self, mm_hash: str, spec: TensorSpec) -> None:
        raise TypeError("a fault")


class RecordingChannel:
    """What an offer's source hears."""

    def __init__(self, budget: ByteBudget) -> None:
        self.failures: list[OfferFailed] = []
        self.num_bytes_held: list[int] = []
        self._budget = budget

    def accept(self, number: int, sink: Sink) -> None:
        raise AssertionError("not accepted")

    def answer(self, number: int, kind: FrameKind) -> None:
        raise AssertionError("not stored")

    async def drop(self, number: int, failure: OfferFailed) -> None:
        self.failures.append(failure)
        self.num_bytes_held.append(self._budget.num_bytes)


async def test_a_fault_costs_the_offer_alone() -> None:
    budget = ByteBudget(1000)
    channel = RecordingChannel(budget)
    reception = Reception(1, OFFER, cast(Any, FaultyStore()), budget, channel)
    assert await reception.run() == TransferFailureKind.UNREACHABLE.value
    assert [failure.kind for failure in channel.failures] == [TransferFailureKind.UNREACHABLE]
    assert channel.num_bytes_held == [4], "until nothing writes to its blocks any more"
    assert budget.num_bytes == 0
