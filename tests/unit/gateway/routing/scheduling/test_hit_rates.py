"""What each policy brings on conversations about shared images, by a model of the engines' prefix caches.

Instances are caches of blocks, least recently used, that forget the ends of prompts first, as vLLM's; a
request stays for some further ones. The router is the gateway's own, with the profiles of `bench routing`.
"""

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import pytest
from routing_policies.arms import AFFINITY, ARMS, LEAST_REQUESTS, ONE, RANDOM, ROUND_ROBIN

from tests.support.gateway.routing import record_of
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.scheduling.candidates import RoutingRequest, divide_prompt
from triptych_gateway.routing.scheduling.profiles import read_profiles

BLOCK_TOKENS = 32
IMAGE_TOKENS = 256


@dataclass
class BlockCache:
    """An engine's: of tokens that were prompts, in blocks by all that comes before them."""

    num_blocks: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def compute(self, tokens: list[int]) -> int:
        """A prompt; returns how many of its tokens were there."""
        chains = []
        chain = 0
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain = hash((chain, *tokens[start : start + BLOCK_TOKENS]))
            chains.append(chain)
        num_hits = next((n for n, each in enumerate(chains) if each not in self.blocks), len(chains))
        for each in reversed(chains):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > self.num_blocks:
            self.blocks.popitem(last=False)
        return num_hits * BLOCK_TOKENS


@dataclass
class Talk:
    """A conversation. A token is four bytes of text; an image has tokens of its own."""

    image: int
    rng: random.Random
    system: bytes
    parts: list[bytes] = field(default_factory=list)

    def next_turn(self) -> None:
        self.parts += [self.rng.randbytes(4 * 100), self.rng.randbytes(4 * 10)]

    def tokens(self) -> list[int]:
        image = [-1 - self.image] * IMAGE_TOKENS
        return [*_tokens_of(self.system), *image, *(each for part in self.parts for each in _tokens_of(part))]

    def request(self) -> RoutingRequest:
        item = MmHash(f"{self.image:064x}")
        parts = [self.system, item, *self.parts]
        num_bytes = sum(map(len, self.parts))
        return RoutingRequest("m", "", (item,), num_bytes, lambda: divide_prompt(parts, "m"))


def _tokens_of(text: bytes) -> list[int]:
    return [int.from_bytes(text[start : start + 4], "big") for start in range(0, len(text), 4)]


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    largest_share: float  # of all requests, that went to one instance


def simulate(
    arm: str, *, num_instances: int = 2, cache_tokens: int = 40_000, num_in_flight: int = 4, seed: int = 1
) -> Outcome:
    """Forty conversations of five turns about ten images, eight of them at a time."""
    rng = random.Random(seed)
    names = [f"pd-{number}" for number in range(1 if arm == ONE else num_instances)]
    records: list[InstanceRecord] = [record_of(name, kv_cache_tokens=cache_tokens) for name in names]
    # The bar is one instance that holds as much as the others together.
    size = cache_tokens * num_instances // len(names) // BLOCK_TOKENS
    caches = {name: BlockCache(size) for name in names}
    router = Router(2.0, read_profiles(ARMS[arm]))
    system = rng.randbytes(4 * 32)
    talks = [Talk(number % 10, random.Random(f"{seed}/{number}"), system) for number in range(40)]
    running, waiting = talks[:8], talks[8:]
    turns = dict.fromkeys(map(id, talks), 0)
    in_flight: deque[tuple[str, RoutingRequest]] = deque()
    num_tokens = num_hits = 0
    counts = dict.fromkeys(names, 0)
    while running:
        talk = rng.choice(running)
        talk.next_turn()
        request = talk.request()
        chosen = router.pick_instance(
            records, model="m", namespace_digest=None, exclude=frozenset(), now=0.0, routing=request
        )
        assert chosen is not None
        router.begin_request(chosen.instance, request)
        in_flight.append((chosen.instance, request))
        if len(in_flight) > num_in_flight:
            router.end_request(*in_flight.popleft())
        tokens = talk.tokens()
        counts[chosen.instance] += 1
        num_tokens += len(tokens)
        num_hits += caches[chosen.instance].compute(tokens)
        turns[id(talk)] += 1
        if turns[id(talk)] == 5:
            running.remove(talk)
            running += [waiting.pop()] if waiting else []
    return Outcome(num_hits / num_tokens, max(counts.values()) / sum(counts.values()))


@pytest.mark.parametrize("cache_tokens", [40_000, 8_000], ids=["room", "tight"])
@pytest.mark.parametrize("num_instances", [2, 4])
def test_affinity_has_nearly_the_hits_of_one_instance(cache_tokens: int, num_instances: int) -> None:
    found = {arm: simulate(arm, num_instances=num_instances, cache_tokens=cache_tokens) for arm in ARMS}
    hits = {arm: outcome.hit_rate for arm, outcome in found.items()}
    assert hits[AFFINITY] >= 0.9 * hits[ONE], hits
    for arm in (RANDOM, ROUND_ROBIN, LEAST_REQUESTS):
        misses = (1 - hits[AFFINITY]) / (1 - hits[arm])
        assert misses <= 0.8, f"{arm}: {hits}"
    assert found[AFFINITY].largest_share <= 1.5 / num_instances, "and the work is shared"
