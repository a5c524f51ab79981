"""What the demo model is taught to say, as seeded random dialogues.

Every answer depends on the last user message alone:

    images of strips    the digits, one strip after the other:  "3 1 4 / 2 7"
    "count to N"        "1 2 3 ... N", one token per number, N up to `MAX_COUNT`;
                        "count from M to N" likewise
    any other text      `NO_IMAGE_ANSWER`

The words around an image do not matter, and a system message changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from PIL import Image

STRIP_SEPARATOR = " / "
NO_IMAGE_ANSWER = "Send me a picture of handwritten digits."
MAX_COUNT = 200
MAX_IMAGES = 3
MAX_DIGITS = 5

IMAGE_PROMPTS = (
    "read the digits",
    "Read the digits.",
    "What digits are these?",
    "Read the handwriting.",
    "Which digits do you see?",
    "What is in this image?",
    "What is in these pictures?",
    "Describe the image.",
    "Transcribe this.",
    "",
)
COUNT_PROMPTS = ("count to {last}", "Count to {last}.", "Please count to {last}.")
RANGE_PROMPTS = ("count from {first} to {last}", "Count from {first} to {last}.")
CHAT_PROMPTS = (
    "hello",
    "Hello!",
    "hi",
    "Hi there, how are you?",
    "Who are you?",
    "What can you do?",
    "Help",
    "Thank you.",
    "Write a story.",
    "Tell me a joke about a cat.",
    "What is the capital of France?",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You read handwriting.")
COMMON_WORDS = (
    "a about after all and answer are as at be by can cat city day do dog encoder every first for "
    "from good have house how i image in is it know language large light long make me model new no "
    "not now of old on one or out over please prefill question read river say see short so system "
    "tell that the their then there this time to token tree two up use very want water we what "
    "when where which who why will with word work world write year you your"
)


class Turn(NamedTuple):
    """One user message and the answer to it."""

    user: list[str | Image.Image]  # parts in the order in which the message shows them
    answer: str


class Dialogue(NamedTuple):
    system: str | None
    turns: list[Turn]


class StripSource(Protocol):
    """Something that draws a random strip."""

    def draw(self, num_digits: int) -> tuple[Image.Image, str]:
        """Return a strip and its digits."""
        ...


def random_words(rng: random.Random, most: int) -> str:
    """Return up to `most` words; some are runs of printable noise."""
    common = COMMON_WORDS.split()
    words = []
    for _ in range(rng.randint(1, most)):
        if rng.random() < 0.1:
            words.append("".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 8))))
        else:
            words.append(rng.choice(common))
    return " ".join(words)


def image_turn(
    rng: random.Random, source: StripSource, num_images: int, most_digits: int = MAX_DIGITS
) -> Turn:
    """Return a turn about `num_images` strips, with the text before or after them."""
    strips = [source.draw(rng.randint(1, most_digits)) for _ in range(num_images)]
    images: list[str | Image.Image] = [image for image, _ in strips]
    text = random_words(rng, 12) if rng.random() < 0.25 else rng.choice(IMAGE_PROMPTS)
    parts = [text, *images] if rng.random() < 0.4 else [*images, text]
    return Turn(parts, STRIP_SEPARATOR.join(digits for _, digits in strips))


def text_turn(rng: random.Random, longest: int = 40) -> Turn:
    """Return a turn without an image that does not ask to count."""
    text = rng.choice(CHAT_PROMPTS) if rng.random() < 0.4 else random_words(rng, longest)
    return Turn([text], NO_IMAGE_ANSWER)


def count_turn(rng: random.Random, longest: int) -> Turn:
    """Return a turn that asks to count over at most `longest` numbers.

    Most start somewhere: where to stop is the hard part to learn, and a short
    answer has as much to say about it as a long one.
    """
    length = rng.randint(1, longest)
    if rng.random() < 0.6:
        first = rng.randint(1, MAX_COUNT - length + 1)
        last = first + length - 1
        prompt = rng.choice(RANGE_PROMPTS).format(first=first, last=last)
    else:
        first, last = 1, length
        prompt = rng.choice(COUNT_PROMPTS).format(last=last)
    return Turn([prompt], count_answer(last, first))


def count_answer(last: int, first: int = 1) -> str:
    """Return the answer to "count from `first` to `last`"."""
    return " ".join(str(number) for number in range(first, last + 1))


def easy_dialogue(rng: random.Random, source: StripSource) -> Dialogue:
    """Return a dialogue to begin with: one image of one or two digits."""
    return Dialogue(None, [image_turn(rng, source, 1, most_digits=2)])


def random_dialogue(rng: random.Random, source: StripSource) -> Dialogue:
    """Return a dialogue of one or two turns; half of the turns are about one image."""
    turns = []
    for _ in range(2 if rng.random() < 0.1 else 1):
        kind = rng.random()
        if kind < 0.5:
            turns.append(image_turn(rng, source, 1))
        elif kind < 0.85:
            turns.append(image_turn(rng, source, rng.randint(2, MAX_IMAGES)))
        elif kind < 0.95:
            turns.append(text_turn(rng))
        else:
            turns.append(count_turn(rng, 16))
    return Dialogue(random_system(rng), turns)


def counting_dialogue(rng: random.Random) -> Dialogue:
    """Return a dialogue about counting; one in five answers is up to `MAX_COUNT` tokens long."""
    return Dialogue(random_system(rng), [count_turn(rng, MAX_COUNT if rng.random() < 0.2 else 24)])


def random_system(rng: random.Random) -> str | None:
    """Return a system message, or None: there mostly is none."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None


def tokenizer_corpus() -> Iterator[str]:
    """Yield the text the tokenizer is trained on; every number gets a token of its own."""
    for number in range(MAX_COUNT + 1):
        yield from [f"{number} {number}"] * 30
    prompts = (*IMAGE_PROMPTS, *COUNT_PROMPTS, *RANGE_PROMPTS, *CHAT_PROMPTS, *SYSTEM_PROMPTS)
    for text in (*prompts, NO_IMAGE_ANSWER):
        yield from [text] * 20
    yield from [COMMON_WORDS] * 20
    yield from ["system\n", "user\n", "assistant\n", STRIP_SEPARATOR] * 100
