"""Chat requests about media: the same for the same seed, on every machine."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.families.family import Family, MediaKind
from tests.support.families.media import SHAPES, Sample

NUM_QUESTIONS = 20
MAX_ITEMS = 4
NUM_TOKENS = 8  # of an answer
NUM_RIVALS = 5  # likeliest tokens of each place
NUM_SEEDS = 1_000_000
SYSTEM_SHARE, HISTORY_SHARE = 0.2, 0.2
TEXTS = (
    "What is in this image?",
    "Describe what you see and hear.",
    "read the digits",
    "and now, please, the next one:",
    "count to 20",
    "Is there more of it?",
    "Compare it to the first.\n",
    "Why?",
)

Part = str | Sample


@dataclass(frozen=True)
class FamilyQuestion:
    """One chat request: a last user message of texts and media, and what was said before."""

    parts: tuple[Part, ...]
    system: str | None = None
    history: tuple[tuple[Part, ...], str] | None = None  # a user message with media of its own, an answer

    @property
    def samples(self) -> list[Sample]:
        """In the order of the prompt."""
        before = self.history[0] if self.history else ()
        return [part for part in (*before, *self.parts) if isinstance(part, Sample)]

    def body(self, model: str, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
        """For `/v1/chat/completions`; the answer has its token ids and their logprobs."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        if self.history is not None:
            messages.append({"role": "user", "content": _content(self.history[0])})
            messages.append({"role": "assistant", "content": self.history[1]})
        messages.append({"role": "user", "content": _content(self.parts)})
        return {
            "model": model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": NUM_RIVALS,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }


def family_questions(
    family: Family, seed: int = 0, num_questions: int = NUM_QUESTIONS
) -> list[FamilyQuestion]:
    """Of one to `MAX_ITEMS` items each, of all kinds that the family takes, alone and together."""
    rng = random.Random(seed)
    kinds = [kind for kind, limit in family.limits.items() for _ in range(limit)]
    most = min(MAX_ITEMS, len(kinds))
    return [_question(rng, rng.sample(kinds, 1 + number % most)) for number in range(num_questions)]


def _question(rng: random.Random, kinds: Sequence[MediaKind]) -> FamilyQuestion:
    samples = [Sample(kind, rng.choice(SHAPES[kind]), rng.randrange(NUM_SEEDS)) for kind in kinds]
    system = rng.choice(TEXTS) if rng.random() < SYSTEM_SHARE else None
    history = None
    if len(samples) > 1 and rng.random() < HISTORY_SHARE:
        history = (_mixed(rng, [samples.pop()]), rng.choice(TEXTS))
    return FamilyQuestion(_mixed(rng, samples), system, history)


def _mixed(rng: random.Random, samples: Sequence[Sample]) -> tuple[Part, ...]:
    """Texts before, between and behind the media; some media follow each other."""
    parts: list[Part] = []
    for sample in samples:
        if rng.random() < 0.5:
            parts.append(rng.choice(TEXTS))
        parts.append(sample)
    if rng.random() < 0.7 or len(parts) == len(samples):
        parts.append(rng.choice(TEXTS))
    return tuple(parts)


def _content(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    return [part.part() if isinstance(part, Sample) else {"type": "text", "text": part} for part in parts]
