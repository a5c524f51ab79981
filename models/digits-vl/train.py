"""Train the demo model and write its folder.

    python train.py                              # into this folder; 10 to 40 minutes on one core
    python train.py --steps 200 --out other
    python train.py --hold-back 250 --out other  # watch generalisation without the held-out set

Held-out digits are never looked at here: `evaluate.py` measures them. To choose
settings, keep some of the training digits back and read the printed accuracy.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import build
import numpy as np
import torch
from dialogues import (
    Dialogue,
    counting_dialogue,
    easy_dialogue,
    image_turn,
    random_dialogue,
)
from PIL import Image
from strips import DIGIT_PX, Digits, format_answer, join_digits, load_split, scale_digit

IGNORED = -100  # label of a token that is not part of an answer
COUNTING_EVERY = 4  # one step in so many teaches counting, whose answers are long
COUNTING_BATCH = 16
EASY_SHARE = 0.12  # of the steps, at the start, one image of few digits


class DigitStrips:
    """Draws strips from a set of digits, distorted a little where asked."""

    def __init__(self, digits: Digits, rng: random.Random, *, augment: bool) -> None:
        self._digits = digits
        self._rng = rng
        self._augment = augment

    def draw(self, num_digits: int) -> tuple[Image.Image, str]:
        """Return a strip of `num_digits` random digits and its answer."""
        chosen = [self._rng.randrange(len(self._digits.labels)) for _ in range(num_digits)]
        images = [scale_digit(self._digits.images[index]) for index in chosen]
        if self._augment:
            images = [self._distort(image) for image in images]
        return join_digits(images), format_answer(self._digits.labels[chosen].tolist())

    def _distort(self, image: Image.Image) -> Image.Image:
        """Turn, shear, scale and shift by a little, about the middle of the digit."""
        uniform = self._rng.uniform
        angle, shear = np.deg2rad(uniform(-10, 10)), uniform(-0.15, 0.15)
        scale_x, scale_y = uniform(0.88, 1.12), uniform(0.88, 1.12)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        matrix = turn @ np.array([[scale_x, shear], [0.0, scale_y]])
        middle = np.full(2, DIGIT_PX / 2)
        offset = middle - matrix @ middle + np.array([uniform(-4, 4), uniform(-4, 4)])
        coefficients = (*matrix[0], offset[0], *matrix[1], offset[1])
        return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


class Batcher:
    """Turns dialogues into tensors by the processor that also serves requests."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "right"
        self._header = tokenizer.encode(f"{build.TURN_START}assistant\n")
        self._turn_end = tokenizer.convert_tokens_to_ids(build.TURN_END)

    def collate(self, dialogues: list[Dialogue]) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments, with labels on the answers alone."""
        batch = self._processor.apply_chat_template(
            [to_messages(dialogue) for dialogue in dialogues],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        batch["labels"] = self._answer_labels(batch["input_ids"])
        return dict(batch)

    def _answer_labels(self, input_ids: torch.Tensor) -> torch.Tensor:
        labels = torch.full_like(input_ids, IGNORED)
        for row, ids in enumerate(input_ids.tolist()):
            for start in find_all(ids, self._header):
                begin = start + len(self._header)
                end = ids.index(self._turn_end, begin) + 1
                labels[row, begin:end] = input_ids[row, begin:end]
        return labels


def find_all(ids: list[int], pattern: list[int]) -> list[int]:
    """Return every index at which `pattern` starts in `ids`."""
    return [i for i in range(len(ids)) if ids[i : i + len(pattern)] == pattern]


def to_messages(dialogue: Dialogue) -> list[dict[str, Any]]:
    """Return `dialogue` in the form chat templates take."""
    messages: list[dict[str, Any]] = []
    if dialogue.system is not None:
        messages.append({"role": "system", "content": [{"type": "text", "text": dialogue.system}]})
    for turn in dialogue.turns:
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in turn.user
        ]
        answer = [{"type": "text", "text": turn.answer}]
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": answer})
    return messages


def exact_share(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Return the share of rows whose answer is predicted without a wrong token."""
    model.eval()
    with torch.no_grad():
        predicted = model(**batch).logits[:, :-1].argmax(-1)
    model.train()
    labels = batch["labels"][:, 1:]
    right = (predicted == labels) | (labels == IGNORED)
    return float(right.all(1).float().mean())


def train(args: argparse.Namespace) -> None:
    """Train from nothing and write the folder."""
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    processor = build.build_processor()
    model = build.build_model(processor.tokenizer, args.seed)
    batcher = Batcher(processor)

    pool = load_split()[0]
    kept = len(pool.labels) - args.hold_back
    source = DigitStrips(Digits(pool.images[:kept], pool.labels[:kept]), rng, augment=True)
    check = None
    if args.hold_back:
        check_rng = random.Random(1)
        kept_back = Digits(pool.images[kept:], pool.labels[kept:])
        checked = DigitStrips(kept_back, check_rng, augment=False)
        check = batcher.collate(
            [Dialogue(None, [image_turn(check_rng, checked, 1 + i % 3)]) for i in range(300)]
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, args.steps)
    model.train()
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        if step <= EASY_SHARE * args.steps:
            dialogues = [easy_dialogue(rng, source) for _ in range(args.batch)]
        elif step % COUNTING_EVERY == 0:
            dialogues = [counting_dialogue(rng) for _ in range(COUNTING_BATCH)]
        else:
            dialogues = [random_dialogue(rng, source) for _ in range(args.batch)]
        loss = model(**batcher.collate(dialogues)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 in (0, 1) or step == args.steps:
            exact = f" kept-back exact {exact_share(model, check):.3f}" if check else ""
            elapsed = time.monotonic() - started
            print(f"step {step} loss {loss.item():.4f}{exact} {elapsed:.0f} s", flush=True)

    processor.tokenizer.padding_side = "left"
    build.save_folder(args.out, model.eval(), processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--hold-back", type=int, default=0, help="training digits kept for checks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
