"""Workloads of a system, real or simulated: kinds of requests, and their arrivals."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Arrivals(StrEnum):
    """Arrival process of one stream's requests."""

    CLOSED = "closed"  # each client sends the next request when the answer has ended
    REGULAR = "regular"  # at equal distances
    POISSON = "poisson"  # independent of each other


@dataclass(frozen=True)
class RequestKind:
    """Kind of request, by its contents."""

    name: str
    num_images: int = 0
    image_side: int = 448  # pixels; a multiple of 28
    num_text_words: int = 4  # a word is a token
    num_output_tokens: int = 16
    text_before_share: float = 0.0  # of the text; the rest follows the images
    known_share: float = 0.0  # of the images: sealed in the store before, so no encoder is asked

    @property
    def rows_per_image(self) -> int:
        """Embedding rows of one image: a row is 28 × 28 pixels."""
        return (self.image_side // 28) ** 2

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_text_words + self.num_images * self.rows_per_image


@dataclass(frozen=True)
class Stream:
    """Requests of one kind. `num_clients` for closed arrivals, `rate` (requests/s) for the others.

    Open arrivals begin at `begins_s` and end at `ends_s`, at the latest with the workload.
    """

    kind: RequestKind
    arrivals: Arrivals
    num_clients: int = 1
    rate: float = 0.0
    begins_s: float = 0.0
    ends_s: float = float("inf")


@dataclass(frozen=True)
class Workload:
    """Streams that run together for `seconds`; what has begun by then is answered."""

    streams: Sequence[Stream]
    seconds: float

    @property
    def kinds(self) -> list[RequestKind]:
        return list(dict.fromkeys(stream.kind for stream in self.streams))


ONE_IMAGE = RequestKind("one image", 1)
FOUR_IMAGES = RequestKind("four images", 4)
TEXT = RequestKind("text", num_text_words=64, num_output_tokens=64)


def closed(kind: RequestKind, num_clients: int, seconds: float) -> Workload:
    return Workload([Stream(kind, Arrivals.CLOSED, num_clients)], seconds)


def check_workloads(seconds: float) -> dict[str, Workload]:
    """Workloads that check the predictions; the model is fitted to those of `calibration.FITTED`."""
    image_each_second = Stream(ONE_IMAGE, Arrivals.REGULAR, rate=1.0)
    small = RequestKind("small image", 1, image_side=224)
    return {
        "one client, text": closed(TEXT, 1, seconds),
        "one client, one small image": closed(small, 1, seconds),
        "one client, one image": closed(ONE_IMAGE, 1, seconds),
        "one client, long text": closed(RequestKind("long text", num_text_words=1024), 1, seconds),
        "four clients, text": closed(TEXT, 4, seconds),
        "one client, four images": closed(FOUR_IMAGES, 1, seconds),
        "mixed: two text streams, an image a second": Workload(
            [Stream(TEXT, Arrivals.CLOSED, 2), image_each_second], seconds
        ),
        "saturation: eight clients, one image": closed(ONE_IMAGE, 8, seconds),
        "saturation: eight clients, half of them text": Workload(
            [Stream(ONE_IMAGE, Arrivals.CLOSED, 4), Stream(TEXT, Arrivals.CLOSED, 4)], seconds
        ),
    }
