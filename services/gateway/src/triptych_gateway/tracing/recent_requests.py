"""The last requests of a gateway, as the page at `/ui` shows them: ids, sizes and times, never a text.

A ring of `max_requests`: the oldest goes when another begins. `RequestSpan` fills in what happens. Listeners
get the requests that have changed; several changes of a request before a listener reads count once, so a
listener's memory is bounded by the ring.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import orjson

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeCompleted, EncoderCacheMetadata, Message
from triptych_gateway.tracing.timings import FirstTokenStages, ItemTiming, Stage, in_ms

CLIENT_CLOSED = 499
FRESH_S = 0.5  # greatest age of a running request's times on the page
REPEATED = "repeated"  # an item that the request names more than once


class TokenCount(Protocol):
    """Counter of tokens in a streamed answer."""

    @property
    def num_tokens(self) -> int: ...


class RecentRequest:
    """One request, whose attributes `RequestSpan` alone sets."""

    def __init__(
        self, ring: "RecentRequests", request_id: str, route: str, owner: str, stages: FirstTokenStages
    ) -> None:
        """Store the request; `owner` is the API key's (`Caller.owner`)."""
        self._ring = ring
        self.request_id, self.route, self.owner = request_id, route, owner
        self.stages = stages
        self.began_s = time.time() - (time.monotonic() - stages.arrived_at)
        self.key_name: str | None = None
        self.model: str | None = None
        self.is_stream = False
        self.num_items = 0
        self.items: Mapping[MmHash, ItemTiming] = {}
        self.way: str | None = None  # process that encodes: `remote`, `local`
        self.reason: str | None = None  # reason of `way`
        self.instance: str | None = None  # the prefill_decode that answers
        self.first_token_at: float | None = None  # monotonic seconds; None also of whole answers
        self.tokens: TokenCount | None = None
        self.num_prompt_tokens: int | None = None
        self.num_answer_tokens: int | None = None
        self.status: int | None = None  # of HTTP; None: it runs
        self.error_type: str | None = None
        self.ended_at: float | None = None
        self._shown: orjson.Fragment | None = None  # as it was at `_shown_at`, until it changes
        self._shown_at = 0.0  # monotonic seconds

    def touch(self) -> None:
        self._shown = None
        self._ring.on_change(self)

    def end(self, status: int, now: float) -> None:
        """End the request; only the first call counts."""
        if self.status is None:
            self.status, self.ended_at = status, now
            self.num_answer_tokens, self.tokens = self.num_tokens, None
            self._ring.on_end(self)
            self.touch()

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the answer, from its usage or as counted."""
        if self.num_answer_tokens is None and self.tokens is not None:
            return self.tokens.num_tokens
        return self.num_answer_tokens

    @property
    def avoided(self) -> Mapping[str, int]:
        """Avoided encodes by reason; None if an instance has encoded all itself."""
        found: Counter[str] = Counter()
        if self.way == "local":
            return found
        for item in self.items.values():
            found[REPEATED] += item.num_places - 1
            if item.source is not None and item.source != "encoded":
                found[item.source.value] += 1
        return +found

    @property
    def state(self) -> str:
        """State of the request: `done`, `refused`, `failed`, `left`, `streaming`, or a stage."""
        if self.status is None:
            return "streaming" if self.first_token_at is not None else self._running_stage()
        if self.status < 400:
            return "done"
        if self.status == CLIENT_CLOSED:
            return "left"
        return "failed" if self.status >= 500 else "refused"

    def as_fragment(self, now: float) -> orjson.Fragment:
        """Return `as_json` as bytes, made once per change; of a running request at most `FRESH_S` old."""
        is_stale = self.status is None and now - self._shown_at >= FRESH_S
        if self._shown is None or is_stale:
            self._shown, self._shown_at = orjson.Fragment(orjson.dumps(self.as_json(now))), now
        return self._shown

    def as_json(self, now: float) -> dict[str, Any]:
        """Return times in milliseconds since the request's arrival."""
        began, end = self.stages.arrived_at, now if self.ended_at is None else self.ended_at
        return {
            "request_id": self.request_id,
            "began_s": round(self.began_s, 3),
            "route": self.route,
            "key_name": self.key_name,
            "model": self.model,
            "is_stream": self.is_stream,
            "num_items": self.num_items,
            "state": self.state,
            "status": self.status,
            "error": self.error_type,
            "way": self.way,
            "reason": self.reason,
            "instance": self.instance,
            "first_token_ms": None if self.first_token_at is None else in_ms(self.first_token_at - began),
            "duration_ms": in_ms(end - began),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "avoided": self.avoided,
            "stages": [
                {"stage": name, "from_ms": in_ms(since - began), "to_ms": in_ms(until - began)}
                for name, since, until in self._segments(end)
            ],
            "items": [item.as_json(began) for item in self.items.values()],
        }

    def _segments(self, end: float) -> Iterator[tuple[str, float, float]]:
        yield from self.stages.segments
        last = self.stages.last_at
        yield self._running_stage() if self.first_token_at is None else "stream", last, end

    def _running_stage(self) -> str:
        ended = {stage for stage, _, _ in self.stages.segments}
        if Stage.BODY not in ended:
            return Stage.BODY
        if self.model is None:
            return Stage.QUEUE
        if self.num_items and self.way is None:
            return Stage.QUEUE if Stage.MEDIA in ended else Stage.MEDIA
        if self.num_items and self.way == "remote" and Stage.SIZES not in ended:
            return Stage.SIZES
        return Stage.PREFILL if self.is_stream else "answer"


class Listener:
    """Listener for changes of the requests that its owner may see. Used by one task."""

    def __init__(self, owner: str | None) -> None:
        """Listen for requests of `owner`, or of every API key with None."""
        self.owner = owner
        self._changed: dict[str, RecentRequest] = {}
        self._has_changes = asyncio.Event()

    def on_change(self, request: RecentRequest) -> None:
        if self.owner is None or request.owner == self.owner:
            self._changed[request.request_id] = request
            self._has_changes.set()

    def forget(self, request: RecentRequest) -> None:
        self._changed.pop(request.request_id, None)

    def take_changes(self) -> list[RecentRequest]:
        """Return and clear the changed requests, in the order of their first change."""
        taken = [*self._changed.values()]
        self._changed.clear()
        self._has_changes.clear()
        return taken

    async def wait_changes(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._has_changes.wait()
        except TimeoutError:
            return


class RecentRequests:
    """Ring of requests, its listeners, and the count of encodes avoided since the gateway's start."""

    def __init__(self, max_requests: int, max_listeners: int) -> None:
        self._requests: deque[RecentRequest] = deque()
        self._max_requests = max_requests
        self._max_listeners = max_listeners
        self._max_own = max(1, max_listeners // 4)  # of one owner: else one key could take all
        self._listeners: set[Listener] = set()
        self.num_requests = 0  # requests that have ended
        self.num_items = 0  # their items
        self.avoided: Counter[str] = Counter()  # their encodes that were avoided, by reason

    def begin_request(
        self, request_id: str, route: str, owner: str, stages: FirstTokenStages
    ) -> RecentRequest:
        """Add a request whose key was checked."""
        if len(self._requests) >= self._max_requests:
            oldest = self._requests.popleft()
            for listener in self._listeners:
                listener.forget(oldest)
        begun = RecentRequest(self, request_id, route, owner, stages)
        self._requests.append(begun)
        self.on_change(begun)
        return begun

    def visible_to(self, owner: str | None) -> list[RecentRequest]:
        """Return the owner's requests, or all with None, the oldest first."""
        return [each for each in self._requests if owner is None or each.owner == owner]

    def on_change(self, request: RecentRequest) -> None:
        for listener in self._listeners:
            listener.on_change(request)

    def on_encode_result(self, message: Message) -> None:
        """Read an encoder's message, which may come after the end of the requests it is for."""
        now = time.monotonic()
        if isinstance(message, EncodeCompleted):
            self._on_sealed(MmHash(message.mm_hash), message.encoder, message.encode_s, now)
        elif isinstance(message, EncoderCacheMetadata) and message.sealed:
            self._on_sealed(MmHash(message.mm_hash), "", 0.0, now)

    def _on_sealed(self, mm_hash: MmHash, encoder: str, encode_s: float, now: float) -> None:
        for request in self._requests:
            item = request.items.get(mm_hash)
            if item is not None and item.awaits_seal:
                before = request.avoided
                item.on_sealed(encoder, encode_s, now)
                if request.status is not None:  # else they are counted at its end
                    self.avoided.update(Counter(request.avoided) - Counter(before))
                request.touch()

    def on_end(self, request: RecentRequest) -> None:
        self.num_requests += 1
        self.num_items += request.num_items
        self.avoided.update(request.avoided)

    @contextmanager
    def listen(self, owner: str | None) -> Iterator[Listener]:
        """Listen until the block ends. One owner may have a quarter of the listeners, None all.

        Raises:
            RequestError: 429: the limit of listeners is reached.
        """
        num_own = sum(owner is not None and each.owner == owner for each in self._listeners)
        if num_own >= self._max_own or len(self._listeners) >= self._max_listeners:
            raise RequestError(429, "too_many_listeners", "too many pages are open; close one, or try later")
        listener = Listener(owner)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
