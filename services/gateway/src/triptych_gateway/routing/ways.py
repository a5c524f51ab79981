"""Way of a request: whole to one instance, or prefill at one and decode at another. Pure.

    both kinds are there      where the load is least; a pair's is that of its busier half
    one kind is there         that one
    a decode instance has the prompt's beginning, items included       that one alone
    what is asked for cannot be divided                                one instance alone

`LeastLoad` decides between the kinds; another policy is another class with its `choose`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Load = tuple[bool, int]  # (all of them could not be reached a moment ago, fewest requests in flight)


class Way(StrEnum):
    WHOLE = "whole"  # one instance does all of it
    STAGED = "staged"  # one prefills, another takes its KV cache and decodes
    DECODE = "decode"  # an instance that decodes, alone: it has the KV cache of the prompt, or computes it


class WayReason(StrEnum):
    NO_PAIR = "no_pair"  # no pair of instances that prefill and decode can take it, or one has failed to
    NO_WHOLE = "no_whole"  # no instance that does all of it can
    LEAST_LOAD = "least_load"
    PREFIX_HELD = "prefix_held"  # an instance that decodes has answered the conversation so far
    NOT_DIVIDED = "not_divided"  # it asks for what cannot be divided
    NO_TOKENS = "no_tokens"  # the endpoint computes none
    STORED_RESPONSE = "stored_response"  # it goes on from a response that one instance has
    ENCODES = "encodes"  # the instance is to encode the request's media itself


class WayPolicy(Protocol):
    """Policy for a request that can be served whole or by a pair."""

    def choose(self, whole: Load, pair: Load) -> Way:
        """Choose the way; `pair` is the load of its busier half."""
        ...


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Policy by least load. Equal loads go whole, which costs no transfer."""

    def choose(self, whole: Load, pair: Load) -> Way:
        return Way.STAGED if pair < whole else Way.WHOLE


def decide(policy: WayPolicy, whole: Load | None, pair: Load | None) -> tuple[Way, WayReason] | None:
    """Return the way of a request that may be divided; None without an instance of either kind."""
    if whole is None or pair is None:
        if whole is not None:
            return Way.WHOLE, WayReason.NO_PAIR
        return None if pair is None else (Way.STAGED, WayReason.NO_WHOLE)
    return policy.choose(whole, pair), WayReason.LEAST_LOAD
