"""What a server answers to a family's questions; and a monolithic vLLM, whose answers are the right ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.support.families.folders import family_folder
from tests.support.families.registry import ALL_FAMILIES
from tests.support.real.system import Server, running_monolith

TIMEOUT_S = 120
TOLERANCE = 1e-3  # of a logprob in float32, between engines that batch differently
BFLOAT16_TOLERANCE = 2**-4 + 1e-3
"""One rounding step of a logit between 8 and 16: some CPUs sum steps of other sizes in another order."""
Rivals = tuple[tuple[int, float], ...]
"""Likeliest tokens of one place, each with its logprob."""


@dataclass(frozen=True)
class TokenAnswer:
    """A greedy answer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each of them
    rivals: tuple[Rivals, ...]


def answer_to(
    server: Server,
    body: dict[str, Any],
    timeout_s: float = TIMEOUT_S,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> TokenAnswer:
    """The answer to a body of `FamilyQuestion.body`; `headers` go with it.

    Raises:
        AssertionError: it is an error; the text is the server's.
    """
    reply = httpx.post(
        f"{server.base_url}/chat/completions",
        json=body, timeout=timeout_s, trust_env=False, headers={"Authorization": "Bearer none", **headers},
    )  # fmt: skip
    assert reply.status_code == httpx.codes.OK, f"{reply.status_code}: {reply.text[:2000]}"
    answer = reply.json()
    (choice,) = answer["choices"]
    return TokenAnswer(
        prompt_token_ids=tuple(answer["prompt_token_ids"]),
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(each["logprob"] for each in choice["logprobs"]["content"]),
        rivals=tuple(
            tuple(
                (int(top["token"].removeprefix("token_id:")), top["logprob"]) for top in each["top_logprobs"]
            )
            for each in choice["logprobs"]["content"]
        ),
    )


def answers_to(
    server: Server, bodies: Iterable[dict[str, Any]], num_asked_at_once: int = 1
) -> list[TokenAnswer]:
    """In the order of `bodies`."""
    with ThreadPoolExecutor(num_asked_at_once) as pool:
        return list(pool.map(lambda body: answer_to(server, body), bodies))


def difference(expected: TokenAnswer, got: TokenAnswer, tolerance: float = TOLERANCE) -> str:
    """Return what is not the same, in words; empty if nothing differs.

    Where two tokens are equally likely for both, within the tolerance, each may take another one. What comes
    behind it has another prompt, and is not compared.
    """
    if expected.prompt_token_ids != got.prompt_token_ids:
        return f"prompt\n  {expected.prompt_token_ids}\n  {got.prompt_token_ids}"
    pairs = enumerate(zip(expected.token_ids, got.token_ids, strict=True))
    end = next((place for place, (ours, theirs) in pairs if ours != theirs), len(got.token_ids))
    if end < len(got.token_ids) and not _is_even(expected, got, end, tolerance):
        rivals = f"{expected.rivals[end]}\n  {got.rivals[end]}"
        return f"tokens\n  {expected.token_ids}\n  {got.token_ids}\n  {rivals}"
    apart = max((abs(expected.logprobs[each] - got.logprobs[each]) for each in range(end)), default=0.0)
    return f"logprobs {apart:.1e} apart" if apart > tolerance else ""


def _is_even(expected: TokenAnswer, got: TokenAnswer, place: int, tolerance: float) -> bool:
    """True if each answer's token of this place is for the other one as likely as its own."""
    return all(
        one.logprobs[place] - dict(one.rivals[place]).get(other.token_ids[place], -1e9) <= tolerance
        for one, other in ((expected, got), (got, expected))
    )


@contextmanager
def family_monolith(name: str, log_folder: Path, *options: str) -> Iterator[Server]:
    """A monolithic vLLM with the model of family `name`; `options`: more of vLLM's own.

    One engine takes 2.6 GiB: end it before the next one is started.
    """
    model = family_folder(name)
    options = (*ALL_FAMILIES[name].engine_options, *options)
    with running_monolith(log_folder, *options, model=model, is_forked=True) as server:
        yield server


def monolith_answers(name: str, bodies: Sequence[dict[str, Any]], log_folder: Path) -> list[TokenAnswer]:
    """Start family `name`'s monolith, ask it one thing after the other, and end it.

    Args:
        bodies: their `model` is the name of the family's folder.
    """
    with family_monolith(name, log_folder) as server:
        return answers_to(server, bodies)
