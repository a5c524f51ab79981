"""The encoder cache managers, on vLLM's own base class. No engine is started."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import (
    INSTANCE,
    FakeMessageSender,
    FakePinLink,
    FakeRequest,
    fake_request,
    mm_hash,
    pinned,
    whole_request,
)
from triptych_vllm_connector.consumer.consumer import Consumer, Inbox, PinReply
from triptych_vllm_connector.consumer.local_encode import LocalEncode, encodes_no_request
from triptych_vllm_connector.consumer.preallocator import make_preallocator

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.connector import TriptychECConnector
    from triptych_vllm_connector.scheduler.encoder_cache_manager import (
        ForgettingEncoderCacheManager,
        PreallocatingEncoderCacheManager,
    )

A, B = mm_hash("a"), mm_hash("b")
COMPUTE_BUDGET = 100


class PrefillDecode:
    """Manager and consumer, tied as the parking scheduler ties them."""

    def __init__(self, has_encoder: bool = False) -> None:
        self.manager = PreallocatingEncoderCacheManager.create_manager(
            cache_size=10, vllm_config=SimpleNamespace()
        )
        self.pins = FakePinLink()
        preallocator = make_preallocator("sync", self.manager.budget_embeds)
        encodes_request = (
            LocalEncode(lambda modality: {"image_grid_thw"}).encodes_request
            if has_encoder
            else encodes_no_request
        )
        self.inbox = Inbox()
        self.consumer = Consumer(
            INSTANCE,
            self.pins,
            FakeMessageSender(),
            preallocator,
            self.manager,
            self.inbox,
            encodes_request=encodes_request,
        )
        self.manager.attach_consumer(self.consumer)

    def pin(self, request: FakeRequest, identifier: str, pin_id: int) -> None:
        self.consumer.admit_request(request, 0)
        self.inbox.post_event(PinReply(identifier, pinned(identifier, pin_id)))
        self.consumer.drain_inbox()

    def can_allocate(self, request: Any, place: int = 0, compute_budget: int = COMPUTE_BUDGET) -> bool:
        return self.manager.can_allocate(request, place, compute_budget, 0)

    def load(self, request: Any, place: int = 0) -> None:
        """What the scheduler does with an item that `has_cache_item`."""
        self.manager.allocate(request, place)
        self.consumer.load_item(request.request_id, request.mm_features[place].identifier)

    def computed(self, request: Any, place: int = 0) -> None:
        """`_free_encoder_input`."""
        self.manager.free_encoder_input(request, place)
        self.consumer.on_item_computed(request.request_id, place)

    def finish(self, request: Any) -> None:
        """`_free_request`."""
        self.consumer.on_finished(request, 0)
        self.manager.free(request)

    def is_empty(self) -> bool:
        manager = self.manager
        full = manager.num_free_slots == manager.num_freeable_slots == manager.cache_size
        return full and not (manager.cached or manager.freeable or manager.request_cached_ids)


@pytest.fixture
def pd() -> PrefillDecode:
    return PrefillDecode()


# ---- prefill_decode ------------------------------------------------------------------------------
def test_an_item_that_is_not_pinned_cannot_be_allocated(pd: PrefillDecode) -> None:
    """Or else vLLM would plan an encode, which kills an engine without a tower."""
    request = fake_request("r1", [(A, 4)])
    assert not pd.can_allocate(request)
    pd.consumer.admit_request(request, 0)
    assert not pd.can_allocate(request)
    pd.pin(request, A, 1)
    assert pd.can_allocate(request)


def test_a_load_costs_no_compute_budget(pd: PrefillDecode) -> None:
    request = fake_request("r1", [(A, 4)])
    pd.pin(request, A, 1)
    assert pd.can_allocate(request, compute_budget=0)


def test_vllms_own_count_never_limits_what_was_granted(pd: PrefillDecode) -> None:
    assert pd.manager.budget_embeds == 10
    request = fake_request("r1", [(A, 9)])
    pd.pin(request, A, 1)
    assert pd.manager.can_allocate(request, 0, COMPUTE_BUDGET, 1_000_000)


def test_an_entry_goes_when_its_last_place_is_computed(pd: PrefillDecode) -> None:
    request = fake_request("r1", [(A, 4)])
    pd.pin(request, A, 1)
    pd.load(request)
    assert pd.manager.is_in_use("r1", 0)
    assert pd.manager.get_freed_mm_hashes() == []
    pd.computed(request)
    assert not pd.manager.is_in_use("r1", 0)
    assert pd.manager.get_freed_mm_hashes() == [A]
    assert pd.is_empty()


def test_an_entry_that_another_request_was_granted_stays(pd: PrefillDecode) -> None:
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    pd.pin(first, A, 1)
    pd.consumer.admit_request(second, 0)
    pd.load(first)
    pd.computed(first)
    assert pd.manager.get_freed_mm_hashes() == []
    assert pd.manager.check_and_update_cache(second, 0)  # a hit, long after the first was done
    pd.computed(second)
    assert pd.manager.get_freed_mm_hashes() == [A]
    assert pd.is_empty()


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_an_entry_goes_with_its_request(pd: PrefillDecode, end: str) -> None:
    request = fake_request("r1", [(A, 4), (B, 4)])
    pd.pin(request, A, 1)
    pd.pin(request, B, 2)
    pd.load(request, 0)
    if end == "finish":
        pd.consumer.take_loads()
        pd.finish(request)
    else:
        pd.consumer.take_loads()
        pd.manager.free(request)
        pd.consumer.on_preempted("r1")
    assert pd.manager.get_freed_mm_hashes() == [A]
    assert ("unpin", 2) in pd.pins.take()
    assert pd.is_empty()


def test_a_step_that_vllm_gave_up_keeps_the_entry(pd: PrefillDecode) -> None:
    """No KV blocks: vLLM frees its references, the request will try again."""
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    pd.pin(first, A, 1)
    pd.consumer.admit_request(second, 0)
    pd.load(first)
    pd.manager.check_and_update_cache(second, 0)
    pd.manager.free(second)
    pd.manager.free(first)
    assert pd.manager.get_freed_mm_hashes() == []
    assert pd.manager.check_and_update_cache(second, 0)


def test_evicting_is_idempotent_whatever_refers_to_the_entry(pd: PrefillDecode) -> None:
    request = fake_request("r1", [(A, 4)])
    pd.manager.allocate(request, 0)
    pd.manager.evict_item(A)
    pd.manager.evict_item(A)
    assert pd.manager.get_freed_mm_hashes() == [A]
    pd.manager.free(request)
    assert pd.is_empty()


# ---- prefill_decode that has a tower -------------------------------------------------------------
@pytest.fixture
def with_tower() -> PrefillDecode:
    return PrefillDecode(has_encoder=True)


def local_request(request_id: str, rows: int = 4) -> FakeRequest:
    return whole_request(request_id, [(A, rows)])


def test_a_local_item_is_encoded_here_and_forgotten(with_tower: PrefillDecode) -> None:
    request = local_request("r1")
    assert not with_tower.can_allocate(request), "it has no space yet"
    assert with_tower.consumer.admit_request(request, 0)
    assert with_tower.can_allocate(request)
    assert not with_tower.can_allocate(request, compute_budget=3)
    with_tower.load(request)
    assert with_tower.consumer.take_loads() == []
    assert with_tower.pins.take() == []
    with_tower.computed(request)
    assert with_tower.manager.get_freed_mm_hashes() == [A]
    assert with_tower.is_empty()


def test_local_and_remote_items_share_one_budget(with_tower: PrefillDecode) -> None:
    remote, local = fake_request("r1", [(B, 7)]), local_request("l")
    with_tower.pin(remote, B, 1)
    assert not with_tower.consumer.admit_request(local, 0)
    assert not with_tower.can_allocate(local)
    with_tower.finish(remote)
    assert with_tower.consumer.drain_inbox() == ["l"]
    assert with_tower.consumer.admit_request(local, 0)
    assert with_tower.can_allocate(local)
    with_tower.finish(local)
    assert with_tower.consumer.counts()["preallocated_embeds"] == 0


@pytest.mark.parametrize("data", [{"image_grid_thw": 1}, None])
def test_an_item_without_media_is_never_encoded_here(with_tower: PrefillDecode, data: Any) -> None:
    """From any sender: a step that plans it would end the engine."""
    request = local_request("r1")
    request.mm_features = [replace(feature, data=data) for feature in request.mm_features]
    with_tower.consumer.admit_request(request, 0)
    assert ("pin_or_watch", A) in with_tower.pins.take()
    assert not with_tower.can_allocate(request)


def test_an_instance_without_a_tower_encodes_nothing(pd: PrefillDecode) -> None:
    request = local_request("r1")
    assert not pd.consumer.admit_request(request, 0)
    assert not pd.can_allocate(request)


def test_a_local_item_is_encoded_even_where_a_remote_one_is_pinned(with_tower: PrefillDecode) -> None:
    """vLLM asks the connector for an item by its name alone: the scheduler names the request before."""
    connector = TriptychECConnector.__new__(TriptychECConnector)
    connector._consumer = with_tower.consumer
    remote, local = fake_request("r1", [(A, 4)]), local_request("l")
    with_tower.pin(remote, A, 1)
    with_tower.consumer.admit_request(local, 0)
    connector.plan_request("l")
    assert with_tower.can_allocate(local)
    assert not connector.has_cache_item(A)
    connector.plan_request("r1")
    assert with_tower.can_allocate(remote)
    assert connector.has_cache_item(A)


def test_a_view_that_a_local_request_refers_to_outlives_the_remote_one(with_tower: PrefillDecode) -> None:
    """A step that is being planned may read it."""
    remote, local = fake_request("r1", [(A, 4)]), local_request("l")
    with_tower.pin(remote, A, 1)
    with_tower.load(remote)
    with_tower.consumer.take_loads()
    with_tower.consumer.admit_request(local, 0)
    assert with_tower.manager.check_and_update_cache(local, 0)
    with_tower.finish(remote)
    assert with_tower.manager.get_freed_mm_hashes() == []
    with_tower.computed(local)
    assert with_tower.manager.get_freed_mm_hashes() == [A]
    assert with_tower.is_empty()


def test_a_local_request_does_not_take_a_view_from_a_remote_one(with_tower: PrefillDecode) -> None:
    """The remote one was granted it, and has not been scheduled yet: it could never load it again."""
    first, second, local = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)]), local_request("l")
    with_tower.pin(first, A, 1)
    with_tower.consumer.admit_request(second, 0)
    with_tower.load(first)
    with_tower.computed(first)
    with_tower.consumer.admit_request(local, 0)
    assert with_tower.manager.check_and_update_cache(local, 0)
    with_tower.computed(local)
    assert with_tower.manager.check_and_update_cache(second, 0)
    with_tower.computed(second)
    assert with_tower.is_empty()


def test_a_local_item_that_a_remote_request_used_too_is_forgotten(with_tower: PrefillDecode) -> None:
    remote, local = fake_request("r1", [(A, 4)]), local_request("l")
    with_tower.pin(remote, A, 1)
    with_tower.consumer.admit_request(local, 0)
    with_tower.load(local)  # encoded here
    assert with_tower.manager.check_and_update_cache(remote, 0)  # so the pinned one is not loaded
    with_tower.computed(local)
    with_tower.computed(remote)
    assert ("unpin", 1) in with_tower.pins.take()
    assert with_tower.manager.get_freed_mm_hashes() == [A]
    assert with_tower.is_empty()


# ---- encoder -------------------------------------------------------------------------------------
@pytest.fixture
def forgetting() -> ForgettingEncoderCacheManager:
    manager = ForgettingEncoderCacheManager.create_manager(cache_size=10, vllm_config=SimpleNamespace())
    assert isinstance(manager, ForgettingEncoderCacheManager)
    return manager


def slots(manager: ForgettingEncoderCacheManager) -> tuple[int, int]:
    return manager.num_free_slots, manager.num_freeable_slots


def test_the_encoder_never_hits_what_another_request_has(forgetting: ForgettingEncoderCacheManager) -> None:
    first, second = fake_request("r1", [(A, 4)]), fake_request("r2", [(A, 4)])
    forgetting.allocate(first, 0)
    assert not forgetting.check_and_update_cache(second, 0)


def test_the_encoder_does_not_encode_twice_for_one_request(forgetting: ForgettingEncoderCacheManager) -> None:
    """A prompt longer than a step comes again with the same item."""
    request = fake_request("r1", [(A, 4)])
    assert not forgetting.check_and_update_cache(request, 0)
    forgetting.allocate(request, 0)
    assert forgetting.check_and_update_cache(request, 0)


def test_the_encoder_forgets_an_item_with_its_last_use(forgetting: ForgettingEncoderCacheManager) -> None:
    request: Any = fake_request("r1", [(A, 4), (B, 6)])
    forgetting.allocate(request, 0)
    forgetting.allocate(request, 1)
    assert slots(forgetting) == (0, 0)
    forgetting.free(request)
    assert sorted(forgetting.get_freed_mm_hashes()) == [A, B]
    assert slots(forgetting) == (10, 10)
    assert not forgetting.cached


def test_two_requests_with_one_item_do_not_lose_space(forgetting: ForgettingEncoderCacheManager) -> None:
    first: Any = fake_request("r1", [(A, 4)])
    second: Any = fake_request("r2", [(A, 4)])
    forgetting.allocate(first, 0)
    forgetting.allocate(second, 0)
    assert slots(forgetting) == (6, 6)
    forgetting.free(first)
    assert forgetting.get_freed_mm_hashes() == []
    forgetting.free(second)
    assert forgetting.get_freed_mm_hashes() == [A]
    assert slots(forgetting) == (10, 10)
