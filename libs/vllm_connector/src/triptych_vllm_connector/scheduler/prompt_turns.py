"""Whose prompt is computed next: flows share what prefill takes. Pure.

A flow is all requests of one API key, or of one tenant (`ECTransferParams.flow`); those that do not say so
are one flow. Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request has a tag from when it
comes, the start of its turn. A flow's turn starts where its last one ends, or now if that is later. Now is
the tag of the prompt that began last. A turn ends later by the tokens of the prompt. Prompts go by their
tags, so a flow that has one request waits for none of what another has beyond its own turn, and requests of
one flow go as they came. What ends before its turn has cost nothing.
"""

from collections import Counter

UNNAMED = ""
"""The flow of those that name none: all who send text alone, among others."""


class PromptTurns:
    """Of the requests of one engine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by flow, of those that end later than now
        self._tags: dict[str, float] = {}
        self._flows: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # tokens of their prompts
        self._not_begun: set[str] = set()
        self._num_waiting_tokens: Counter[str] = Counter()  # by flow, of prompts that are not begun
        self._num_requests: Counter[str] = Counter()  # by flow
        self._last: tuple[str, float] = ("", 0.0)  # flow and tag of the latest turn that was begun
        self._last_of_others = 0.0  # the same, of all flows but that one

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
        self._num_waiting_tokens[flow] += num_tokens
        self._num_requests[flow] += 1

    def begin_prompt(self, engine_request_id: str) -> None:
        """Its prompt is computed from now on. Idempotent."""
        if engine_request_id not in self._not_begun:
            return
        self._leave_waiting(engine_request_id)
        flow, tag = self._flows[engine_request_id], self._tags[engine_request_id]
        if flow == self._last[0]:
            self._last = (flow, max(tag, self._last[1]))
        elif tag > self._last[1]:
            self._last, self._last_of_others = (flow, tag), self._last[1]
        else:
            self._last_of_others = max(tag, self._last_of_others)
        if tag > self._now:
            self._now = tag
            self._ends = {flow: end for flow, end in self._ends.items() if end > tag}

    def remove_request(self, engine_request_id: str) -> None:
        """It has ended. Idempotent."""
        flow = self._flows.get(engine_request_id)
        if flow is None:
            return
        if not self.has_begun(engine_request_id):
            if flow in self._ends:
                self._ends[flow] -= self._sizes[engine_request_id]
            self._leave_waiting(engine_request_id)
        del self._flows[engine_request_id], self._tags[engine_request_id], self._sizes[engine_request_id]
        self._num_requests[flow] -= 1
        if not self._num_requests[flow]:
            del self._num_requests[flow]

    def has_begun(self, engine_request_id: str) -> bool:
        """Its prompt is computed, or was."""
        return engine_request_id not in self._not_begun

    def has_turn(self, engine_request_id: str) -> bool:
        """Does nobody who has begun, or who comes now, come before it?"""
        return self.tag_of(engine_request_id) <= self._now

    def is_late(self, engine_request_id: str) -> bool:
        """Has a prompt of another flow begun whose turn came after this one's?"""
        is_last = self._flows.get(engine_request_id) == self._last[0]
        return self.tag_of(engine_request_id) < (self._last_of_others if is_last else self._last[1])

    def is_ahead(self, engine_request_id: str, of: str) -> bool:
        """Does the request's flow wait for more than `of` does, and than this request asked for?

        So it has more than one further request under way. Never the flow of those that name none.
        """
        flow = self._flows.get(engine_request_id, UNNAMED)
        least = max(self._sizes.get(of, 0), self._sizes.get(engine_request_id, 0))
        return flow != UNNAMED and self._num_waiting_tokens[flow] > least

    def tag_of(self, engine_request_id: str) -> float:
        """The start of its turn: the least goes first."""
        return self._tags.get(engine_request_id, 0.0)

    def _leave_waiting(self, engine_request_id: str) -> None:
        flow = self._flows[engine_request_id]
        self._not_begun.remove(engine_request_id)
        self._num_waiting_tokens[flow] -= self._sizes[engine_request_id]
        if not self._num_waiting_tokens[flow]:
            del self._num_waiting_tokens[flow]
