"""Questions to the demo model, with the answers that a monolithic vLLM gave."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.support.fast.client import Question
from tests.support.real.system import MODEL, Server, image_part, load_strips

NUM_IMAGES = 60
NUM_QUESTIONS = {0: 40, 1: NUM_IMAGES, 2: 30, 3: 30, 4: 30}  # by number of images
NUM_ASKED_AT_ONCE = 8
MAX_TOKENS = 40
STAMP_NUM_BYTES = 8
TEXTS = ("read the digits", "What digits are these?", "hello", "count to 200", "read them again")


@dataclass(frozen=True)
class RealQuestion(Question):
    """At temperature 0, past every end of sequence: so the answer's beginning is known for any length."""

    token_ids: tuple[int, ...] = ()

    @property
    def words(self) -> list[str]:
        return [str(each) for each in self.token_ids[: self.num_tokens]]

    def body(self) -> dict[str, Any]:
        own = {"model": MODEL.name, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**super().body(), **own}

    def words_in(self, choice: dict[str, Any]) -> list[str]:
        return [str(each) for each in choice.get("token_ids") or ()]


@dataclass(frozen=True)
class _Known:
    text: str
    images: tuple[bytes, ...]
    token_ids: tuple[int, ...]


class Catalogue:
    """Questions without end out of some that were answered.

    What is behind the end of an image's data makes it another image for every cache, and the answer stays.
    """

    def __init__(self, known: Sequence[_Known]) -> None:
        self._known: dict[int, list[_Known]] = defaultdict(list)
        for each in known:
            self._known[len(each.images)].append(each)
        self._stamps = count(1)

    @classmethod
    def answered_by(
        cls, server: Server, seed: int, num_questions: Mapping[int, int] = NUM_QUESTIONS
    ) -> "Catalogue":
        """Ask `server`, which must compute in float32 as the system does.

        Args:
            num_questions: how many with so many images.
        """
        rng = random.Random(seed)
        images = [strip.png for strip in load_strips().held_out_strips(NUM_IMAGES, length=None, seed=seed)]
        asked = [
            (f"{rng.choice(TEXTS)} {number}", tuple(rng.sample(images, num_images)))
            for num_images, number_of_them in num_questions.items()
            for number in range(number_of_them)
        ]

        def answer(question: tuple[str, tuple[bytes, ...]]) -> _Known:
            text, chosen = question
            content = [*map(image_part, chosen), {"type": "text", "text": text}]
            reply = server.ask(content, max_tokens=MAX_TOKENS, ignore_eos=True)
            return _Known(text, chosen, tuple(reply.token_ids))

        with ThreadPoolExecutor(NUM_ASKED_AT_ONCE) as pool:
            return cls(list(pool.map(answer, asked)))

    def draw(self, rng: random.Random, is_new: Sequence[bool], *, stream: bool) -> Question:
        known = rng.choice(self._known[len(is_new)])
        images = tuple(
            self._stamped(image) if new else image for image, new in zip(known.images, is_new, strict=True)
        )
        return RealQuestion(known.text, images, rng.randint(1, MAX_TOKENS), stream, token_ids=known.token_ids)

    def _stamped(self, image: bytes) -> bytes:
        return image + next(self._stamps).to_bytes(STAMP_NUM_BYTES, "big")
