"""In place of vLLM where prompts are computed: a scheduler loop and a model, around the real consumer and
worker.

    add --> waiting --admit--> running --tokens--> finished
               |  ^
               v  | woken
             parked

One thread, as in EngineCore: whatever is to be done comes through its input queue, and other threads
only put into it. A request's prompt is its parts in order; an item's placeholder is as long as its rows
plus two marks. What the KV cache holds of an item is its tensor, so a prefix of equal parts covers items.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.support.fast.processes.tensors import WIDTH, answer_words, tensor_bytes, word_of
from tests.support.fast.prompts import Finished, Item, Prompt, Token
from tests.support.vllm_connector.fake_engine import FakeFeature, FakePosition, FakeRequest
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.item_pins import EngineItemState
from triptych_vllm_connector.pieces import group_pieces
from triptych_vllm_connector.worker.loading import LoadingWorker

log = get_logger(__name__)

GRID_FIELD = "image_grid_thw"  # sizes a placeholder, and is no media
PREFIX_CACHE_ENTRIES = 64
STALLED_STEP_S = 0.005  # while a running request waits for space


@dataclass
class _Running:
    prompt: Prompt
    request: FakeRequest
    tensors: dict[int, bytes] = field(default_factory=dict)  # of each place, as far as they are computed
    held: set[int] = field(default_factory=set)  # places whose item it refers to in the encoder cache
    num_sent: int = 0

    def end_of(self, place: int) -> int:
        position = self.request.mm_features[place].mm_position
        return position.offset + position.length

    @property
    def is_prefilled(self) -> bool:
        return len(self.tensors) == len(self.prompt.items)

    def item_words(self) -> list[str]:
        """Of each media item."""
        places = iter(range(len(self.prompt.items)))
        groups = group_pieces(self.request.mm_features)
        return [word_of(b"".join(self.tensors[next(places)] for _ in group)) for group in groups]


class DecodeEngine:
    """Owns the thread. `on_death` is called on it when the engine cannot go on.

    `encode_s`: how long an item takes that it encodes itself; nothing else goes on meanwhile.
    """

    def __init__(
        self,
        worker: LoadingWorker,
        token_s: float,
        on_death: Callable[[str], None],
        namespace: str,
        encode_s: float,
    ) -> None:
        self._worker = worker
        self._namespace = namespace
        self._token_s = token_s
        self._encode_s = encode_s
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, _Running] = {}
        self._waiting: list[str] = []
        self._parked: set[str] = set()
        self._running: list[str] = []
        self._cached: dict[str, set[str]] = {}  # mm_hash -> requests that refer to it
        self._encoder_cache: dict[str, torch.Tensor] = {}
        self._kv: OrderedDict[str, bytes] = OrderedDict()  # prefix -> tensor of its last item
        self._to_encode: list[Item] = []  # in this step
        self._encoding = threading.Event()  # never set: waited for as long as an encode takes
        self._num_steps = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, consumer: Consumer) -> None:
        """`consumer` has this engine's encoder cache."""
        self._consumer = consumer
        consumer.attach_waker(lambda: self._inbox.put(lambda: None))
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------
    def add(self, prompt: Prompt) -> None:
        self._inbox.put(lambda: self._add(prompt))

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._finish(request_id, None))

    def report(self, on_counts: Callable[[dict[str, int]], None]) -> None:
        """`on_counts` gets what the engine holds; on its thread."""
        self._inbox.put(lambda: on_counts(self._counts()))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(5.0)

    # ---- the engine's thread ---------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._take_input()
                self._step()
        except Exception as error:
            log.exception("engine died")
            self._on_death(str(error))

    def _take_input(self) -> None:
        """Wait as long as there is nothing to do; with tokens to make, as long as one takes."""
        timeout_s: float | None = None
        if any(self._live[engine_request_id].is_prefilled for engine_request_id in self._running):
            timeout_s = self._token_s
        elif self._running:
            timeout_s = STALLED_STEP_S
        try:
            while True:
                command = self._inbox.get(timeout=timeout_s)
                if command is None:
                    self._is_closed = True
                    return
                command()
                if self._inbox.empty():
                    return
        except queue.Empty:
            return

    def _step(self) -> None:
        self._num_steps += 1
        self._resume()
        scheduled = self._schedule()
        lost = self._load()
        self._encode()
        self._compute(scheduled, lost)
        for engine_request_id in self._consumer.take_failed():
            self._finish(engine_request_id, "an item cannot come")
        self._send_tokens()

    def _add(self, prompt: Prompt) -> None:
        features, offset = [], 0
        for item in prompt.items:
            position = FakePosition(offset + 1, item.num_embeds + 2, item.num_embeds)
            features.append(FakeFeature(item.mm_hash, position, _data_of(item), mm_hash=item.media_hash))
            offset += item.num_embeds + 3
        request = FakeRequest(prompt.request_id, features, prompt.transfer_params)
        if features:
            self._consumer.on_request_added(request)
        self._live[prompt.request_id] = _Running(prompt, request)
        self._waiting.append(prompt.request_id)

    def _resume(self) -> None:
        woken = self._consumer.drain_inbox()
        if self._consumer.is_store_lost:
            raise StoreUnavailableError("the lease on the cache store is lost: its tensors cannot be trusted")
        for engine_request_id in self._consumer.take_overdue():
            if engine_request_id in self._live and not self._live[engine_request_id].is_prefilled:
                self._consumer.fail_overdue(self._live[engine_request_id].request)
        ready = [engine_request_id for engine_request_id in woken if engine_request_id in self._parked]
        for engine_request_id in ready:
            self._parked.discard(engine_request_id)
            self._consumer.on_unparked(engine_request_id, self._num_steps)
        self._waiting[:0] = ready

    def _schedule(self) -> list[tuple[str, int]]:
        """Places whose tensors this step reads."""
        scheduled: list[tuple[str, int]] = []
        for engine_request_id in self._running:
            each = self._live[engine_request_id]
            if not each.is_prefilled and self._consumer.admit_request(
                each.request, each.request.num_computed_tokens
            ):
                scheduled += self._plan(each)
        for engine_request_id in list(self._waiting):
            each = self._live[engine_request_id]
            if each.prompt.items:
                covered = self._recall(each)
                if not self._consumer.admit_request(each.request, covered):
                    self._defer(engine_request_id)
                    continue
                each.request.num_computed_tokens = covered
            self._waiting.remove(engine_request_id)
            self._running.append(engine_request_id)
            scheduled += self._plan(each)
        return scheduled

    def _defer(self, engine_request_id: str) -> None:
        if not self._consumer.status(engine_request_id).has_failed:
            self._waiting.remove(engine_request_id)
            self._parked.add(engine_request_id)
            self._consumer.on_parked(engine_request_id, self._num_steps)

    def _recall(self, each: _Running) -> int:
        """Tokens that the KV cache holds. Those of items only: text costs nothing here."""
        each.tensors.clear()
        covered = 0
        for place, item in enumerate(each.prompt.items):
            tensor = self._kv.get(item.prefix)
            if tensor is None:
                break
            self._kv.move_to_end(item.prefix)
            each.tensors[place] = tensor
            covered = each.end_of(place)
        return covered

    def _plan(self, each: _Running) -> list[tuple[str, int]]:
        """As far as the items are here, in order."""
        scheduled: list[tuple[str, int]] = []
        for place in range(len(each.tensors), len(each.prompt.items)):
            item = each.prompt.items[place]
            mm_hash = item.mm_hash
            if mm_hash not in self._cached:
                if not self._may_allocate(each, place):
                    break
                self._cached[mm_hash] = set()
                if item.media is not None:
                    self._to_encode.append(item)
                self._consumer.load_item(each.prompt.request_id, mm_hash)
            self._cached[mm_hash].add(each.prompt.request_id)
            each.held.add(place)
            scheduled.append((each.prompt.request_id, place))
        return scheduled

    def _may_allocate(self, each: _Running, place: int) -> bool:
        """As `PreallocatingEncoderCacheManager.can_allocate`."""
        engine_request_id = each.prompt.request_id
        if self._consumer.status(engine_request_id).is_local:
            return self._consumer.status(engine_request_id).may_encode(place)
        return self._consumer.item_state(each.prompt.items[place].mm_hash) is EngineItemState.PINNED

    def _encode(self) -> None:
        """The vision tower."""
        for item in self._to_encode:
            assert item.media is not None
            self._encoding.wait(self._encode_s)
            raw = bytearray(tensor_bytes(item.media, item.num_embeds, self._namespace))
            self._encoder_cache[item.mm_hash] = torch.frombuffer(raw, dtype=torch.float32).view(-1, WIDTH)
        self._to_encode.clear()

    def _load(self) -> frozenset[str]:
        """The tensors that failed to load, if any; the requests that wait for them fail."""
        self._worker.load_orders(self._encoder_cache, self._consumer.take_loads())
        lost = self._worker.take_failed_loads()
        if lost:
            self._consumer.on_loads_failed(lost)
        return lost

    def _compute(self, scheduled: list[tuple[str, int]], lost: frozenset[str]) -> None:
        """The forward pass, and what follows from its end."""
        for engine_request_id, place in list(scheduled):
            each = self._live[engine_request_id]
            item = each.prompt.items[place]
            if item.mm_hash in lost:
                scheduled.remove((engine_request_id, place))
                continue
            tensor = self._encoder_cache[item.mm_hash]
            each.tensors[place] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            self._kv[item.prefix] = each.tensors[place]
            if len(self._kv) > PREFIX_CACHE_ENTRIES:
                self._kv.popitem(last=False)
        for engine_request_id, place in scheduled:
            each = self._live[engine_request_id]
            each.request.num_computed_tokens = max(each.request.num_computed_tokens, each.end_of(place))
            self._release(each, place)
            self._consumer.on_item_computed(engine_request_id, place)

    def _send_tokens(self) -> None:
        for engine_request_id in list(self._running):
            each = self._live[engine_request_id]
            if not each.is_prefilled:
                continue
            prompt = each.prompt
            words = answer_words(each.item_words(), prompt.text, prompt.num_tokens, self._namespace)
            prompt.send(Token(words[each.num_sent]))
            each.num_sent += 1
            if each.num_sent == len(words):
                self._finish(engine_request_id, None)

    def _finish(self, engine_request_id: str, error: str | None) -> None:
        """Answered, aborted or failed. Of one that has ended already: nothing."""
        each = self._live.pop(engine_request_id, None)
        if each is None:
            return
        for requests in (self._waiting, self._running):
            if engine_request_id in requests:
                requests.remove(engine_request_id)
        self._parked.discard(engine_request_id)
        if each.prompt.items:
            self._consumer.on_finished(each.request, each.request.num_computed_tokens)
        for place in list(each.held):
            self._release(each, place)
        each.prompt.send(Finished(error))

    # ---- the encoder cache -----------------------------------------------------------------------
    def _release(self, each: _Running, place: int) -> None:
        each.held.discard(place)
        mm_hash = each.prompt.items[place].mm_hash
        if not any(each.prompt.items[other].mm_hash == mm_hash for other in each.held):
            holders = self._cached.get(mm_hash)
            if holders is not None:
                holders.discard(each.prompt.request_id)
                if not holders and self._consumer.item_state(mm_hash) is not EngineItemState.RESIDENT:
                    self.evict_item(mm_hash)

    def evict_item(self, mm_hash: str) -> None:
        self._cached.pop(mm_hash, None)
        self._encoder_cache.pop(mm_hash, None)  # the view's finalizer ends its pin

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        return engine_request_id in self._live and item_index in self._live[engine_request_id].held

    def _counts(self) -> dict[str, int]:
        return {
            **self._consumer.counts(),
            "live": len(self._live),
            "parked": len(self._parked),
            "encoder_cache": len(self._encoder_cache),
            "steps": self._num_steps,
        }


def _data_of(item: Item) -> dict[str, object]:
    """As vLLM has it of an item that came with its media, and of one that came without."""
    grid: dict[str, object] = {GRID_FIELD: (1, 2, 2)}
    return grid if item.media is None else {"pixel_values": item.media, **grid}
