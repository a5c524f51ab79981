"""Rounds of the arms in turn, on conversations that no cache knows, of the same shape for all."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from load.client import REQUEST_TIMEOUT_S, Answer, Endpoint, ask
from load.contents import TextMaker

from routing_policies.arms import ONE
from routing_policies.conversations import Conversation, Shape, make_conversations
from routing_policies.prefix_caches import PrefixCounts

SESSION = {"X-Session-Id": "of the bench"}  # of the arm that goes by it alone


@dataclass
class ArmResult:
    """Results of one arm, one entry a round."""

    counts: list[PrefixCounts] = field(default_factory=list)
    answers: list[list[Answer]] = field(default_factory=list)


@dataclass(frozen=True)
class RoutingPlan:
    model: str
    texts: TextMaker
    side: int  # of an image, in pixels
    shape: Shape
    num_rounds: int
    seed: int
    read_counts: Callable[[], PrefixCounts]


async def measure(plan: RoutingPlan, urls: Mapping[str, str]) -> dict[str, ArmResult]:
    """Results by arm; `urls` are of each arm's gateway. The first round warms up, and does not count."""
    results = {arm: ArmResult() for arm in urls}
    for number in range(plan.num_rounds + 1):
        order = random.Random(f"{plan.seed}/{number}").sample(sorted(urls), len(urls))
        for arm in order:
            # The same texts would be known from the arm before; as many and as long ones are not.
            conversations = make_conversations(
                plan.texts, plan.side, plan.shape, plan.seed, f"{number}/{arm}"
            )
            before = await asyncio.to_thread(plan.read_counts)
            headers = SESSION if arm == ONE else {}
            answers = await _ask_all(plan, urls[arm], conversations, headers)
            counts = (await asyncio.to_thread(plan.read_counts)).since(before)
            if number:
                results[arm].counts.append(counts)
                results[arm].answers.append(answers)
            print(f"round {number} {arm}: hit rate {counts.hit_rate:.3f}", flush=True)
    return results


async def _ask_all(
    plan: RoutingPlan, url: str, conversations: list[Conversation], headers: Mapping[str, str]
) -> list[Answer]:
    """Ask all conversations with several clients, mixing their turns."""
    waiting, rng, answers = list(conversations), random.Random(plan.seed), list[Answer]()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=1 << 20) as session:
        endpoint = Endpoint(url, plan.model, session)

        async def client() -> None:
            while waiting:
                conversation = waiting.pop(rng.randrange(len(waiting)))
                question = conversation.next_question()
                if question is not None:
                    answers.append(await ask(endpoint, question))
                    waiting.append(conversation)

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.shape.num_clients):
                group.create_task(client())
    return answers
