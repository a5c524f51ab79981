"""One request and its images on their way through the model."""

from dataclasses import dataclass

import simpy

from simulation.workload import RequestKind


@dataclass(eq=False, slots=True)
class Item:
    """One image. `sized`: its sizes are known to the gateway; `pinned`: its tensor may be used."""

    rows: int
    is_known: bool
    sized: simpy.Event
    pinned: simpy.Event
    is_near: bool = True  # encoder and prefill_decode have the same host
    encoder_host: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """Times in the run's seconds. `computed`: tokens of the prompt whose KV is there."""

    kind: RequestKind
    arrived_s: float
    num_prompt: int
    num_output: int
    items: list[Item]
    item_ends: list[int]  # where each item's tokens end in the prompt
    gateway: int
    ended: simpy.Event
    computed: int = 0
    next_item: int = 0  # the first that is not computed
    num_encoded: int = 0  # items that this engine's own tower has done
    first_token_s: float = 0.0
    ended_s: float = 0.0

    @property
    def rows(self) -> int:
        return sum(item.rows for item in self.items)

    def computable(self, overlap: bool) -> int:
        """Tokens of the prompt that can be computed now: up to the first image that is not there."""
        for index in range(self.next_item, len(self.items)):
            if not self.items[index].pinned.triggered:
                return self.item_ends[index] - self.items[index].rows if overlap else 0
        return self.num_prompt

    def advance(self, num_tokens: int) -> int:
        """The step has computed so many more; returns the rows of the images that are done with it."""
        self.computed += num_tokens
        done = 0
        while self.next_item < len(self.items) and self.item_ends[self.next_item] <= self.computed:
            done += self.items[self.next_item].rows
            self.next_item += 1
        return done
