"""An item takes its place among the orders from one of its requests."""

from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import Modality
from triptych_gateway.encode.flight_requests import place_of
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.encode.job_window import Capacity, JobWindow
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem

NUM_SLOTS = 10
FLOOD, ONE = FairKey(flow="f"), FairKey(flow="1")
DIGEST = "d" * 64


def test_of_the_requests_of_a_lane_one_stands_for_all() -> None:
    """However many share an item: each that joins or leaves looks for its place anew."""
    compared: list[str] = []

    class CountingQueue(ItemQueue):
        def start_of(self, mm_hash: MmHash, request: str, place: OrderPlace) -> float:
            compared.append(request)
            return super().start_of(mm_hash, request, place)

    queue = CountingQueue(JobWindow(lambda digest: Capacity(NUM_SLOTS, NUM_SLOTS, 1)))
    part = MediaPart(0, (), Modality.IMAGE, "", "")
    item = TakenItem(part, MmHash("1" * 64), b"", ImageHeader("PNG", 1, 1), {}, {})
    waits = [
        ItemWait(
            RequestId(f"{fair_key.flow}{at}"), "pd-0", (item,), 60.0 - at, None, DIGEST, fair_key=fair_key
        )
        for at in range(50)
        for fair_key in (FLOOD, ONE)
    ]
    name, place = place_of(item.mm_hash, waits, queue, 0.0)
    assert place is not None
    assert (name, place.deadline) == ("f49", 11.0)
    assert sorted(compared) == ["149", "f49"]
    compared.clear()
    assert place_of(item.mm_hash, waits[::2], queue, 0.0)[0] == "f49"
    assert not compared, "there is nothing to compare"
