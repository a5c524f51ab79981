"""Workloads: rounds of requests, from a seed. Pure, except for the making of images and texts.

A round is the same, byte for byte, for every arm of a repeat, and new in every repeat: no cache knows its
images or the beginnings of its texts.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from load.client import Question
from load.contents import Part, TextMaker, new_image, text_part

from comparison.model_shapes import Scale

SHORT_TOKENS = 12
LONG_TOKENS = 1000
ANSWER_TOKENS = 8  # of a request about images
STREAM_TOKENS = 128
IMAGE_EVERY_S = 1.0
MADE_AHEAD = 48  # questions of one client that exist before the round begins: making them costs time


@dataclass
class Client:
    """Asks one question after the other until the round's time is over."""

    questions: Iterator[Question]
    pause_s: float = 0.0  # between an answer and the next question


@dataclass
class Round:
    """Questions `one_by_one`, or `clients` and `arrivals` for `seconds`."""

    one_by_one: list[Question] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    arrivals: list[tuple[float, Question]] = field(default_factory=list)  # seconds from the start
    seconds: float = 0.0


@dataclass(frozen=True)
class Maker:
    """Makes the questions of one round."""

    rng: random.Random
    texts: TextMaker
    side: int
    label: str  # of the round
    load_seconds: float  # how long a load lasts

    def image(self) -> Part:
        return new_image(self.rng, self.side)

    def text(self, num_tokens: int = SHORT_TOKENS) -> Part:
        return text_part(self.texts.new_text(self.rng, num_tokens))

    def question(
        self, kind: str, parts: list[Part], number: int, max_tokens: int = ANSWER_TOKENS
    ) -> Question:
        message = {"role": "user", "content": parts}
        return Question(kind, [message], max_tokens, f"{self.label}/{number}")


# ---- one after another ---------------------------------------------------------------------------
def _images(count: int, repeated: int, make: Maker) -> Round:
    questions = [
        make.question("image", [*(make.image() for _ in range(count)), make.text()], number)
        for number in range(repeated)
    ]
    return Round(one_by_one=questions)


def _text_then_image(make: Maker) -> Round:
    questions = [
        make.question("image", [make.text(LONG_TOKENS), make.image(), make.text()], number)
        for number in range(2)
    ]
    return Round(one_by_one=questions)


def _image_then_text(make: Maker) -> Round:
    questions = [
        make.question("image", [make.image(), make.text(LONG_TOKENS)], number) for number in range(2)
    ]
    return Round(one_by_one=questions)


def _multi_turn(make: Maker) -> Round:
    """Conversation of four turns with fixed answers; the third brings another image."""
    turns = [
        ("first_turn", [make.image(), make.text()]),
        ("text_turn", [make.text()]),
        ("image_turn", [make.image(), make.text()]),
        ("text_turn", [make.text()]),
    ]
    said: list[Mapping[str, object]] = []
    questions = []
    for number, (kind, parts) in enumerate(turns):
        said.append({"role": "user", "content": parts})
        questions.append(Question(kind, list(said), ANSWER_TOKENS, f"{make.label}/{number}"))
        said.append({"role": "assistant", "content": "it reads 1 2 3"})
    return Round(one_by_one=questions)


def _known_image(make: Maker) -> Round:
    """Questions of which every second one is about the image of the one before."""
    questions = []
    for number in range(3):
        image = make.image()
        first = make.question("new", [image, make.text()], 2 * number)
        questions.append(Question(first.kind, first.messages, first.max_tokens, first.label, is_timed=False))
        questions.append(make.question("known", [image, make.text()], 2 * number + 1))
    return Round(one_by_one=questions)


def _text_only(make: Maker) -> Round:
    return Round(one_by_one=[make.question("text", [make.text()], number) for number in range(10)])


# ---- load ----------------------------------------------------------------------------------------
def _stream(make: Maker, kind: str, with_image: bool, max_tokens: int) -> Iterator[Question]:
    """Endless questions, the first `MADE_AHEAD` made at once; unlabelled, as arms ask different numbers."""

    def new() -> Question:
        parts = [make.image(), make.text()] if with_image else [make.text()]
        return Question(kind, [{"role": "user", "content": parts}], max_tokens)

    ahead = [new() for _ in range(MADE_AHEAD)]

    def questions() -> Iterator[Question]:
        yield from ahead
        while True:
            yield new()

    return questions()


def _text_clients(make: Maker, count: int, pause_s: float = 0.0) -> list[Client]:
    return [Client(_stream(make, "text", False, STREAM_TOKENS), pause_s) for _ in range(count)]


def _beside_images(num_texts: int, pause_s: float, make: Maker) -> Round:
    count = int(make.load_seconds / IMAGE_EVERY_S)
    images = [make.question("image", [make.image(), make.text()], number) for number in range(count)]
    at = [(IMAGE_EVERY_S * (number + 0.5), image) for number, image in enumerate(images)]
    return Round(clients=_text_clients(make, num_texts, pause_s), arrivals=at, seconds=make.load_seconds)


def _saturation(num_images: int, num_texts: int, make: Maker) -> Round:
    images = [Client(_stream(make, "image", True, ANSWER_TOKENS)) for _ in range(num_images)]
    return Round(clients=[*images, *_text_clients(make, num_texts)], seconds=make.load_seconds)


@dataclass(frozen=True)
class Workload:
    name: str
    summary: str
    make: Callable[[Maker], Round]


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("text_only", "a short text", _text_only),
        Workload("one_image", "a new image and a short text", partial(_images, 1, 3)),
        Workload("two_images", "two new images and a short text", partial(_images, 2, 2)),
        Workload("four_images", "four new images and a short text", partial(_images, 4, 1)),
        Workload("eight_images", "eight new images and a short text", partial(_images, 8, 1)),
        Workload("sixteen_images", "sixteen new images and a short text", partial(_images, 16, 1)),
        Workload("text_then_image", "1,000 tokens of new text, then a new image", _text_then_image),
        Workload("image_then_text", "a new image, then 1,000 tokens of new text", _image_then_text),
        Workload("multi_turn", "a conversation of four turns with two new images", _multi_turn),
        Workload("known_image", "an image that was sent before, with another text", _known_image),
        Workload(
            "mixed", "three text streams without pause, a new image each second",
            partial(_beside_images, 3, 0.0),
        ),
        Workload(
            "pausing", "one text stream that pauses 1 s between answers, a new image each second",
            partial(_beside_images, 1, 1.0),
        ),
        Workload("saturation_images", "four clients, each with a new image at once after its answer",
                 partial(_saturation, 4, 0)),
        Workload("saturation_mixed", "four such clients and three text streams", partial(_saturation, 4, 3)),
    )
}  # fmt: skip


def make_round(
    workload: Workload, scale: Scale, texts: TextMaker, load_seconds: float, seed: int, repeat: int
) -> Round:
    """Round for these arguments, deterministic; a `repeat` below 0 is a warm-up."""
    label = f"{workload.name}/{repeat}"
    rng = random.Random(f"{seed}/{label}")
    return workload.make(Maker(rng, texts, scale.image_side, label, load_seconds))
