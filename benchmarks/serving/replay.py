"""A trace of arrivals, replayed: one JSON object per line, in the order of `at_s`.

    {"at_s": 0.0, "text_tokens": 120, "images": [[448, 448], [448, 448]], "output_tokens": 32}
    {"at_s": 0.4, "text_tokens": 800, "images": ["logo", [896, 448]], "output_tokens": 128}

Contents are made up; a trace says how much of what comes when. An image is a size, new each time, or a name:
the same name is the same image (448 × 448 pixels), so repeats are repeats. Images come before the text.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.contents import TextMaker, new_image, text_part

NAMED_SIDE = 448


class TraceFormatError(Exception):
    """A line of the trace is not as described; the text names it."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    text_tokens: int
    output_tokens: int
    images: tuple[tuple[int, int] | str, ...] = ()  # (width, height) in pixels, or a name


def read_arrivals(path: Path) -> list[Arrival]:
    """All of a file.

    Raises:
        TraceFormatError: a line cannot be read, or the times go back.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceFormatError(f"{path.name}, line {number}: {error}") from error
        if arrivals and arrival.at_s < arrivals[-1].at_s:
            raise TraceFormatError(f"{path.name}, line {number}: at_s goes back")
        arrivals.append(arrival)
    if not arrivals:
        raise TraceFormatError(f"{path.name} holds no arrival")
    return arrivals


def _arrival(fields: dict[str, Any]) -> Arrival:
    images = tuple(
        image if isinstance(image, str) else (int(image[0]), int(image[1]))
        for image in fields.get("images", ())
    )
    found = Arrival(float(fields["at_s"]), int(fields["text_tokens"]), int(fields["output_tokens"]), images)
    if found.at_s < 0 or found.text_tokens < 1 or found.output_tokens < 1:
        raise ValueError("at_s must be at least 0, text_tokens and output_tokens at least 1")
    return found


def messages(
    arrivals: list[Arrival], texts: TextMaker, seed: int
) -> Iterator[tuple[Arrival, list[dict[str, Any]]]]:
    """The chat messages of each arrival; the same for the same seed, named images for every seed."""
    rng = random.Random(seed)
    for arrival in arrivals:
        parts = [
            new_image(random.Random(image), NAMED_SIDE)
            if isinstance(image, str)
            else new_image(rng, image[0], image[1])
            for image in arrival.images
        ]
        parts.append(text_part(texts.new_text(rng, arrival.text_tokens)))
        yield arrival, [{"role": "user", "content": parts}]
