"""Measure the model on held-out digits, through transformers or through vLLM.

    python evaluate.py                       # transformers, float32
    python evaluate.py --engine vllm         # vLLM, dtype chosen by vLLM
    python evaluate.py --engine vllm --dtype float32

Prints one line per task: how many answers of how many are exactly right, with
greedy decoding. The vLLM run takes its sampling defaults from the folder.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cpu_imports import prepare_imports
from dialogues import MAX_COUNT, NO_IMAGE_ANSWER, STRIP_SEPARATOR, count_answer
from strips import Strip, held_out_strips

Message = dict[str, Any]
Chat = list[Message]
Answerer = Callable[[list[Chat]], list[str]]

MAX_TOKENS = 300
VLLM_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


class Case(NamedTuple):
    """One request and the only answer that counts as right."""

    chat: Chat
    expected: str


def image_case(strips: list[Strip], text: str, *, text_first: bool = False) -> Case:
    """Return the request that shows `strips` in one user message."""
    images = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(strip.png).decode()},
        }
        for strip in strips
    ]
    words = [{"type": "text", "text": text}]
    content = [*words, *images] if text_first else [*images, *words]
    answer = STRIP_SEPARATOR.join(strip.digits for strip in strips)
    return Case([{"role": "user", "content": content}], answer)


def text_case(text: str, expected: str) -> Case:
    """Return a request without images."""
    return Case([{"role": "user", "content": text}], expected)


def build_tasks(count: int) -> dict[str, list[Case]]:
    """Return `count` requests for each image task, and the text tasks."""
    prompt = "Read the digits."
    tasks = {
        f"1 image, {length} digits": [
            image_case([strip], prompt) for strip in held_out_strips(count, length, seed=100 + length)
        ]
        for length in range(1, 6)
    }
    for num_images in (2, 3):
        strips = held_out_strips(count * num_images, None, seed=200 + num_images)
        tasks[f"{num_images} images, 1 to 5 digits each"] = [
            image_case(
                strips[start : start + num_images],
                "What digits are these?",
                text_first=bool(start // num_images % 2),
            )
            for start in range(0, len(strips), num_images)
        ]
    tasks["1 image, 3 digits, unseen prompt"] = [
        image_case([strip], "Could you please tell me which numbers somebody wrote here?")
        for strip in held_out_strips(count, 3, seed=300)
    ]
    tasks["count to N"] = [text_case(f"count to {n}", count_answer(n)) for n in range(5, MAX_COUNT + 1, 5)]
    tasks["other text"] = [
        text_case(text, NO_IMAGE_ANSWER)
        for text in ("hello", "Who are you?", "What is the weather?", "a b c", "Tell me a story.")
    ]
    return tasks


def open_transformers(folder: Path, dtype: str) -> Answerer:
    """Return an answerer that runs `generate` on small batches."""
    prepare_imports()
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(2)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype)
    ).eval()

    def with_pixels(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image_url":
            return part
        png = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        return {"type": "image", "image": Image.open(io.BytesIO(png))}

    def with_images(chat: Chat) -> Chat:
        return [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [with_pixels(part) for part in message["content"]]}
            for message in chat
        ]

    def answer(chats: list[Chat]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(chats), 20):
            inputs = processor.apply_chat_template(
                [with_images(chat) for chat in chats[start : start + 20]],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"padding": True},
            ).to(model.dtype)
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS)
            new_tokens = output[:, inputs["input_ids"].shape[1] :]
            answers += processor.batch_decode(new_tokens, skip_special_tokens=True)
        return answers

    return answer


def open_vllm(folder: Path, dtype: str) -> Answerer:
    """Return an answerer that runs vLLM in this process tree."""
    for name, value in VLLM_CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    prepare_imports()
    from vllm import LLM

    engine = LLM(str(folder), dtype=dtype, enforce_eager=True)

    def answer(chats: list[Chat]) -> list[str]:
        params = engine.get_default_sampling_params()
        params.max_tokens = MAX_TOKENS
        outputs = engine.chat(chats, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--count", type=int, default=100, help="requests per image task")
    parser.add_argument("--show-wrong", type=int, default=0, help="print so many wrong answers")
    args = parser.parse_args()
    open_engine = {"transformers": open_transformers, "vllm": open_vllm}[args.engine]
    answerer = open_engine(args.model, args.dtype)
    for name, cases in build_tasks(args.count).items():
        answers = answerer([case.chat for case in cases])
        wrong = [
            (case.expected, answer)
            for case, answer in zip(cases, answers, strict=True)
            if answer != case.expected
        ]
        print(f"{name}: {len(cases) - len(wrong)} of {len(cases)}", flush=True)
        for expected, answer in wrong[: args.show_wrong]:
            print(f"    expected {expected[:80]!r}, got {answer[:80]!r}")


if __name__ == "__main__":
    main()
