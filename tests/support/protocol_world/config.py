"""What a small system is, what its clients ask for, and what may go wrong in it."""

from dataclasses import dataclass
from typing import NamedTuple

REDIS = "redis"  # its jobs and flights
FAULTS = (
    "crash_encoder", "freeze_encoder", "crash_consumer", "crash_gateway", "restart_store", "lose_region",
    "cancel", "duplicate", "lose_message", "refuse", "unfit", "preempt", "preempt_late", "prefix", "evict",
    "hurry", "lose_flights", "lose_redis", "lose_load",
)  # fmt: skip
STAGE_FAULTS = (
    "crash_decode", "drain_decode", "forget_prefix", "render_otherwise", "repeat_decode", "lose_read",
)  # fmt: skip
"""Of requests in two stages, besides."""
TOWER_FAULTS = ("whole", "empty_cache")
"""A request with raw media comes straight to an instance with a tower; its encoder cache is emptied."""
PIN_FAULTS = ("refuse_pin",)
"""The store answers a prefill_decode's question with an error."""
TRANSFER_FAULTS = ("crash_agent", "freeze_agent", "cut_link", "block_link", "damage", "lose_transfer")
"""Of several stores, besides."""
ALL_FAULTS = frozenset({*FAULTS, *STAGE_FAULTS, *TRANSFER_FAULTS, *TOWER_FAULTS, *PIN_FAULTS})
HARMLESS = frozenset(
    {
        "crash_encoder",
        "freeze_encoder",
        "restart_store",
        "duplicate",
        "preempt",
        "preempt_late",
        "prefix",
        "evict",
        "crash_gateway",
        "lose_flights",
        "lose_redis",
        *TOWER_FAULTS,
    }
)
"""Faults that cost time alone: every caller whose connection lasts gets an answer all the same."""
SLOW = frozenset({"crash_gateway", "lose_flights", "lose_redis"})
"""Faults that are not announced: the next check of a waiting process finds them."""
PROMPT = frozenset({"cancel", "lose_load", *PIN_FAULTS})
"""Faults after which a caller may have no answer, but no wait ends by its limit."""
ONCE = frozenset(
    {
        "crash_gateway", "crash_consumer", "cancel", "refuse", "unfit", "preempt", "preempt_late", "prefix",
        "lose_load", *TOWER_FAULTS, *PIN_FAULTS,
    }
)  # fmt: skip
"""Faults for which nothing is encoded twice: a failed encode made nothing."""
ERRORS = frozenset(
    {
        "encode_failed", "deadline_exceeded", "instance_unreachable", "generation_failed",
        "store_full", "bus_unavailable", "stream_broken",
        "stream_interrupted", "handover_failed", "no_instance",  # in two stages
    }
)  # fmt: skip
"""The errors that a caller may get: all retryable, but for the last, which ends a stream that has begun."""


@dataclass(frozen=True)
class Config:
    """One small system, and what its clients ask for. Items are named by numbers."""

    requests: tuple[tuple[int, ...], ...] = ((0, 1),)
    rows: tuple[int, ...] = (2, 2)
    num_consumers: int = 1
    num_encoders: int = 1
    num_gateways: int = 1
    strategy: str = "sync"
    budget: int = 4  # rows of each consumer's encoder cache
    num_blocks: int = 4  # of the store; each item is one
    num_reserve_blocks: int = 0
    num_slots: int = 2
    steps_in_flight: int = 1  # of each consumer's engine: 2 under async scheduling
    step_tokens: int = 1 << 30  # of a prompt, in one step of it
    overlap: bool = False  # a prompt is computed up to the first item that is not here
    num_kv_blocks: int = 1 << 30  # of each consumer; each holds a token
    num_choices: int = 1  # answers to each request (`n`): as many requests of its engine
    prefix: int = 0  # tokens of every prompt that the KV cache covers at first
    max_attempts: int = 2
    is_tight: bool = False  # the store may stay too full for a request until the deadline
    shares_consumer: bool = False  # all requests go to the first consumer
    num_prefills: int = 0
    num_decodes: int = 0  # 0: no request is served in two stages
    follows: tuple[int, ...] = ()  # by request: the one whose conversation it goes on with; -1: none
    num_stores: int = 0  # each with a fabric agent; 0: one store, without an agent
    encoders_at: tuple[int, ...] = ()  # the store of each encoder
    consumers_at: tuple[int, ...] = ()  # of each prefill_decode
    fabric_budget: int = 1 << 20  # bytes that an agent reserves for others at once
    is_coarse: bool = False  # see `World._settle`: fewer orders
    faults: tuple[str, ...] = ()
    max_faults: int = 0


class Key(NamedTuple):
    """One step that can be taken. `kind` and its arguments."""

    kind: str
    subject: str = ""
    what: str = ""
    how: str = ""


class Enabled(NamedTuple):
    key: Key
    actors: frozenset[str]  # whose state it changes: steps of others commute with it
    is_fault: bool = False
