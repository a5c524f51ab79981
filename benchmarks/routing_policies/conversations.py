"""Conversations of several turns, some about the same image, from a seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from load.client import Question
from load.contents import Part, TextMaker, new_image, text_part

ANSWER_TOKENS = 4
FIRST, LATER = "first_turn", "later_turn"


@dataclass(frozen=True)
class Shape:
    """Shape of one round. Tokens are those of each text; an image has some hundreds."""

    num_conversations: int = 12
    num_images: int = 4  # that they share
    num_turns: int = 4
    system_tokens: int = 32  # that all of them begin with
    first_tokens: int = 120
    turn_tokens: int = 120
    num_clients: int = 3  # conversations at a time


@dataclass
class Conversation:
    """Conversation so far, with fixed answers of the assistant: the same for all arms."""

    texts: TextMaker
    rng: random.Random
    shape: Shape
    image: Part
    system: str
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    num_asked: int = 0

    def next_question(self) -> Question | None:
        """Next question, or None at the end."""
        shape = self.shape
        if self.num_asked == shape.num_turns:
            return None
        if not self.num_asked:
            self.messages.append({"role": "system", "content": self.system})
            text = text_part(self.texts.new_text(self.rng, shape.first_tokens))
            self.messages.append({"role": "user", "content": [self.image, text]})
        else:
            self.messages.append({"role": "assistant", "content": "it reads 1 2 3"})
            new = self.texts.new_text(self.rng, shape.turn_tokens)
            self.messages.append({"role": "user", "content": new})
        self.num_asked += 1
        return Question(FIRST if self.num_asked == 1 else LATER, list(self.messages), ANSWER_TOKENS)


def make_conversations(
    texts: TextMaker, side: int, shape: Shape, seed: int, label: str
) -> list[Conversation]:
    """Conversations for these arguments, deterministic; no cache knows those of another label."""
    rng = random.Random(f"{seed}/{label}")
    images = [new_image(rng, side) for _ in range(shape.num_images)]
    system = texts.new_text(rng, shape.system_tokens)
    return [
        Conversation(texts, random.Random(rng.random()), shape, images[number % len(images)], system)
        for number in range(shape.num_conversations)
    ]
