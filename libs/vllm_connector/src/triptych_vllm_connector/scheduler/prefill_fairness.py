"""Order of prompts by start-time fair queueing over flows. Pure.

A flow is all requests of one API key or tenant (`ECTransferParams.flow`); unnamed requests form one flow.
Goyal, Vin and Cheng, 1996: each request gets a tag on arrival, its virtual start time, which is the end of
its flow's last turn or the current virtual time, whichever is later. The virtual time is the tag of the
prompt that began last. A turn lasts as many units as the prompt has tokens. Prompts go by their tags, so a
flow with one request does not wait for another flow's backlog, and requests of one flow keep their order. A
request that ends before its turn costs nothing.
"""

from collections import Counter

UNNAMED = ""
"""Flow of all requests that name none, among them all text-only ones."""


class PrefillFairness:
    """Fair queue of one engine's prompts."""

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
        """True if requests of several flows share the engine."""
        return len(self._num_requests) > 1

    def add_request(self, engine_request_id: str, flow: str, num_tokens: int) -> None:
        """Add a request with a prompt of `num_tokens`. Idempotent."""
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
        """Record that the prompt's computation begins. Idempotent."""
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
        """Remove a request that has ended. Idempotent."""
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
        """True if the prompt is being computed, or is done."""
        return engine_request_id not in self._not_begun

    def has_turn(self, engine_request_id: str) -> bool:
        """True if no begun or new request has an earlier virtual start time."""
        return self.tag_of(engine_request_id) <= self._now

    def is_late(self, engine_request_id: str) -> bool:
        """True if a prompt of another flow with a later turn has begun before."""
        is_last = self._flows.get(engine_request_id) == self._last[0]
        return self.tag_of(engine_request_id) < (self._last_of_others if is_last else self._last[1])

    def is_ahead(self, engine_request_id: str, of: str) -> bool:
        """True if the request's flow has more tokens waiting than `of` and than this request.

        Such a flow has more than one further request under way. Always False for the unnamed flow.
        """
        flow = self._flows.get(engine_request_id, UNNAMED)
        least = max(self._sizes.get(of, 0), self._sizes.get(engine_request_id, 0))
        return flow != UNNAMED and self._num_waiting_tokens[flow] > least

    def tag_of(self, engine_request_id: str) -> float:
        """Virtual start time; the lowest goes first."""
        return self._tags.get(engine_request_id, 0.0)

    def _leave_waiting(self, engine_request_id: str) -> None:
        flow = self._flows[engine_request_id]
        self._not_begun.remove(engine_request_id)
        self._num_waiting_tokens[flow] -= self._sizes[engine_request_id]
        if not self._num_waiting_tokens[flow]:
            del self._num_waiting_tokens[flow]
