"""Questions about videos of many durations, rates and sizes, alone and among other media."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from tests.support.families.family import Family, MediaKind
from tests.support.families.media import SHAPES, Sample, TimedVideoShape
from tests.support.families.questions import NUM_SEEDS, TEXTS, FamilyQuestion, Part

MAX_VIDEOS = 3  # of a question
MAX_FRAMES = 240  # of a video: decoding takes time, and models sample a few of them
DURATIONS_S = (0.1, 0.4, 1, 2.3, 4, 8, 15, 30, 60)
RATES = (1, 2, 3.7, 5, 12, 24, 29.97, 60, 120)
SIZES = ((112, 84), (64, 64), (51, 37), (84, 112), (85, 29), (140, 56))


def timed_family(family: Family) -> Family:
    """The family with as many videos in a request as the questions have."""
    return replace(family, limits={**family.limits, MediaKind.VIDEO: MAX_VIDEOS})


def video_shapes(seed: int) -> list[TimedVideoShape]:
    """Return each pair of a duration and a rate that makes between two and `MAX_FRAMES` frames, shuffled."""
    rng = random.Random(seed)
    pairs = [each for each in itertools.product(DURATIONS_S, RATES) if 2 <= each[0] * each[1] <= MAX_FRAMES]
    rng.shuffle(pairs)
    return [
        TimedVideoShape(*rng.choice(SIZES), duration_s, rate, has_variable_rate=number % 4 == 3)
        for number, (duration_s, rate) in enumerate(pairs)
    ]


def video_questions(family: Family, num_questions: int, seed: int = 0) -> list[FamilyQuestion]:
    """Return questions of one to three videos each; every third has other media of the family too."""
    rng = random.Random(seed)
    shapes = itertools.cycle(video_shapes(seed))
    others = [kind for kind in family.limits if kind is not MediaKind.VIDEO]

    def sample(kind: MediaKind) -> Sample:
        shape = next(shapes) if kind is MediaKind.VIDEO else rng.choice(SHAPES[kind])
        return Sample(kind, shape, rng.randrange(NUM_SEEDS))

    def question(number: int) -> FamilyQuestion:
        kinds = [MediaKind.VIDEO] * (1, 1, 1, 2, 1, 3)[number % 6]
        if number % 3 == 2:
            kinds += rng.sample(others, 1)
        rng.shuffle(kinds)
        return FamilyQuestion(_between(rng.choice(TEXTS), [sample(kind) for kind in kinds]))

    return [question(number) for number in range(num_questions)]


def _between(text: str, samples: Sequence[Sample]) -> tuple[Part, ...]:
    """The text behind the first medium, so that positions of text behind a video count too."""
    return (samples[0], text, *samples[1:])
