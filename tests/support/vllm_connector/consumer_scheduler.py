"""vLLM's scheduler and worker, as the consumer meets them: chunks, preemption, full KV caches."""

from collections import deque

from tests.support.vllm_connector.consumer_checks import ConsumerChecks, Running
from tests.support.vllm_connector.scheduled import EncoderReferences, Scheduled
from triptych_vllm_connector.step_orders import LoadOrder

Window = tuple[str, int, int, int]  # (request id, epoch, first token, end)


class PlayedScheduler(ConsumerChecks, EncoderReferences[Running]):
    """The part of `World` that schedules."""

    kv_tokens: int
    max_in_flight: int
    waiting: list[str]
    running: list[str]
    freed: list[str]
    encodes: list[str]
    in_flight: deque[list[Window]]

    # ---- vLLM's scheduler ------------------------------------------------------------------------
    def schedule(self, chunk: int, preempts: str | None = None, kv_fails: bool = False) -> None:
        """One step, of at most `chunk` tokens per request."""
        while len(self.in_flight) >= self.max_in_flight:
            self.update()
        self._resume()
        windows: list[Window] = []
        for engine_request_id in list(self.running):
            windows += self._schedule_running(self.live[engine_request_id], chunk)
        deferred: list[str] = []
        if preempts is None:
            windows += self._schedule_waiting(chunk, kv_fails, deferred)
        else:  # it was scheduled in this very pass, perhaps
            self._preempt(self.live[preempts])
            windows = [window for window in windows if window[0] != preempts]
            self.encodes = [item for item in self.encodes if item in self.cached]  # vLLM takes them back
        for engine_request_id in deferred:
            if not self.consumer.has_failed(engine_request_id):
                self.waiting.remove(engine_request_id)
                self.parked.add(engine_request_id)
                self.consumer.on_parked(engine_request_id, 0)
        freed, self.freed = [item for item in self.freed if item not in self.cached], []
        encodes, self.encodes = self.encodes, []
        self._run_worker(freed, self.consumer.take_loads(), encodes, windows)
        self.in_flight.append(windows)

    def update(self) -> None:
        """The worker's answer to the oldest step."""
        for engine_request_id, epoch, _, _ in self.in_flight.popleft():
            each = self.live.get(engine_request_id)
            if each is None or each.epoch != epoch:
                continue
            for place in sorted(each.inputs):
                if each.end_of(place) <= each.computed:
                    self._free_input(each, place)
                    self.consumer.on_item_computed(engine_request_id, place)
        for engine_request_id in self.consumer.take_failed():
            if engine_request_id in self.live:
                self.finish(engine_request_id)

    def finish(self, engine_request_id: str) -> None:
        """Answered, aborted or failed."""
        each = self.live.pop(engine_request_id)
        self.consumer.on_finished(each.request, each.computed)
        for place in list(each.inputs):
            self._free_input(each, place)
        self.waiting = [other for other in self.waiting if other != engine_request_id]
        self.running = [other for other in self.running if other != engine_request_id]
        self.parked.discard(engine_request_id)

    @property
    def answered(self) -> list[str]:
        """Requests whose prompt is computed, with no step of theirs under way."""
        busy = {window[0] for windows in self.in_flight for window in windows}
        return [r for r in self.running if self.live[r].computed >= self.live[r].prompt_len and r not in busy]

    def _resume(self) -> None:
        woken = [
            engine_request_id
            for engine_request_id in self.consumer.drain_inbox()
            if engine_request_id in self.parked
        ]
        for engine_request_id in woken:
            self.parked.discard(engine_request_id)
            self.consumer.on_unparked(engine_request_id, 0)
        self.waiting = woken + self.waiting

    def _schedule_running(self, each: Running, chunk: int) -> list[Window]:
        is_admitted = self.consumer.admit_request(each.request, each.computed)
        for place in each.inputs:  # steps under way may read it, vLLM reports when they do not
            assert each.request.mm_features[place].identifier in self.cached, "evicted under a running step"
        if not is_admitted:
            return []
        start = each.computed
        if start >= each.prompt_len:
            each.computed += 1  # decode
        else:
            end, loads = self._plan(each, start, min(start + chunk, each.prompt_len))
            self._allocate(each, loads)
            each.computed = end
        return [(each.engine_request_id, each.epoch, start, each.computed)]

    def _schedule_waiting(self, chunk: int, kv_fails: bool, deferred: list[str]) -> list[Window]:
        windows = []
        for engine_request_id in list(self.waiting):
            each = self.live[engine_request_id]
            if not self.consumer.admit_request(each.request, each.prefix):
                deferred.append(engine_request_id)
                continue
            end, loads = self._plan(each, each.prefix, min(each.prefix + chunk, each.prompt_len))
            taken = sum(self.live[other].prompt_len for other in self.running)
            if kv_fails or taken + each.prompt_len > self.kv_tokens:
                for place in list(each.inputs):
                    self._free_input(each, place)
                break
            self._allocate(each, loads)
            self.waiting.remove(engine_request_id)
            self.running.append(engine_request_id)
            windows.append((engine_request_id, each.epoch, each.prefix, end))
            each.computed = end
        return windows

    def _plan(self, each: Running, start: int, end: int) -> tuple[int, list[tuple[int, str]]]:
        """`_try_schedule_encoder_inputs`: clips the step at the first item that is not here."""
        loads: list[tuple[int, str]] = []
        for place, item, first, reads in each.places_in(start, end):
            if item in [load for _, load in loads]:
                loads.append((place, item))
            elif item in self.cached:
                self._refer(each, place)
            elif self.consumer.is_local(each.engine_request_id):
                if not self.consumer.may_encode_item(each.engine_request_id, place):
                    end = max(start, first)
                    break
                if reads:
                    loads.append((place, item))
            elif not self.consumer.is_pinned(item):
                assert not self.consumer.is_resident(item), "the worker has it, vLLM does not know"
                end = max(start, first)
                break
            elif reads:
                loads.append((place, item))
        assert end > start, "admitted, and cannot move"
        return end, loads

    def _allocate(self, each: Running, loads: list[tuple[int, str]]) -> None:
        for place, item in loads:
            if item not in self.cached:
                self.cached[item] = set()
                self.consumer.load_item(each.engine_request_id, item)
                if self.consumer.is_local(each.engine_request_id):
                    self.encodes.append(item)
            self._refer(each, place)

    def _free_input(self, each: Scheduled, place: int) -> None:
        super()._free_input(each, place)
        item = each.request.mm_features[place].identifier
        if self.cached.get(item) == set() and not self.consumer.is_resident(item):
            self.evict_item(item)

    def _preempt(self, each: Running) -> None:
        for place in list(each.inputs):
            self._free_input(each, place)
        self.consumer.on_preempted(each.engine_request_id)
        each.computed = 0
        each.epoch += 1
        self.running.remove(each.engine_request_id)
        self.waiting.insert(0, each.engine_request_id)

    def evict_item(self, item: str) -> None:
        if any(map(self.consumer.is_local, self.cached.get(item, ()))):
            return  # it goes with its last reference
        if self.cached.pop(item, None) is not None:
            self.freed.append(item)

    # ---- vLLM's worker ---------------------------------------------------------------------------
    def _run_worker(
        self, freed: list[str], loads: list[LoadOrder], encodes: list[str], windows: list[Window]
    ) -> None:
        for item in freed:
            if item in self.worker:
                self._drop_view(self.worker.pop(item))
        for item in encodes:
            self._drop_view(self.worker.get(item))  # what it replaces
            self.worker[item] = None
        for order in loads:
            assert self.store.is_lost or self.store.pins.get(order.pin_id) == order.mm_hash, "not pinned"
            self._drop_view(self.worker.get(order.mm_hash))  # evicted and loaded in one pass: replaced
            self.worker[order.mm_hash] = order.pin_id
        for engine_request_id, _, start, end in windows:
            for _, item, _, reads in self.live[engine_request_id].places_in(start, end):
                assert not reads or item in self.worker, "the step reads an item that is not there"

    def _drop_view(self, pin_id: int | None) -> None:
        if pin_id is not None:
            self.store.end_pin(pin_id)
