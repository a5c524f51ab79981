"""Whose prompt is computed next: flows share what prefill takes. Pure.

A flow is all requests of one API key, or of one tenant (`ECTransferParams.flow`); those that do not say so
are one flow. Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request has a tag from when it
comes, the start of its turn. A flow's turn starts where its last one ends, or now if that is later. Now is
the tag of the prompt that began last. A turn ends later by the tokens of the prompt. Prompts go by their
tags, so a flow that has one request waits for none of what another has beyond its own turn, and requests of
one flow go as they came. What ends before its turn has cost nothing.
"""

from collections import Counter


class PromptTurns:
    """Of the requests of one engine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by flow, of those that end later than now
        self._tags: dict[str, float] = {}
        self._flows: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # tokens of their prompts
        self._not_begun: set[str] = set()
        self._num_requests: Counter[str] = Counter()  # by flow

    @property
    def are_several(self) -> bool:
        """Do requests of several flows share?"""
        return len(self._num_requests) > 1

    def add_request(self, engine_request_id: str, flow: str, num_tokens: int) -> None:
        """A request with a prompt of so many tokens has come. Again: nothing new."""
        if engine_request_id in self._tags:
            return
        tag = max(self._now, self._ends.get(flow, 0.0))
        self._ends[flow] = tag + num_tokens
        self._tags[engine_request_id] = tag
        self._flows[engine_request_id] = flow
        self._sizes[engine_request_id] = num_tokens
        self._not_begun.add(engine_request_id)
        self._num_requests[flow] += 1

    def begin_prompt(self, engine_request_id: str) -> None:
        """Its prompt is computed from now on. Idempotent."""
        self._not_begun.discard(engine_request_id)
        tag = self._tags.get(engine_request_id, 0.0)
        if tag > self._now:
            self._now = tag
            self._ends = {flow: end for flow, end in self._ends.items() if end > tag}

    def remove_request(self, engine_request_id: str) -> None:
        """It has ended. Idempotent."""
        flow = self._flows.pop(engine_request_id, None)
        if flow is not None:
            del self._tags[engine_request_id]
            num_tokens = self._sizes.pop(engine_request_id)
            if engine_request_id in self._not_begun and flow in self._ends:
                self._ends[flow] -= num_tokens
            self._not_begun.discard(engine_request_id)
            self._num_requests[flow] -= 1
            if not self._num_requests[flow]:
                del self._num_requests[flow]

    def is_late(self, engine_request_id: str) -> bool:
        """Has a prompt begun whose turn came after this one's?"""
        return self.tag_of(engine_request_id) < self._now

    def is_ahead(self, engine_request_id: str, of: str) -> bool:
        """Has the request's flow taken, or asked for, more than what `of` asks for, counted from now?"""
        end = self._ends.get(self._flows.get(engine_request_id, ""), 0.0)
        return end - self._now > self._sizes.get(of, 0)

    def tag_of(self, engine_request_id: str) -> float:
        """The start of its turn: the least goes first."""
        return self._tags.get(engine_request_id, 0.0)
