"""Which requests an engine that decodes ends before anything is computed for them, and why. Pure.

A KV cache is read once: its owner frees it as soon as one reader is done. So a second request that names it
is ended, and does not read what may be another's by then. Likewise one whose prompt was rendered to other
tokens than those that the KV cache is of; its owner frees it then. And one of whose items something would
have to be computed: there is no encoder here, and no encoder output.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from triptych_vllm_connector.kv_failures import KvFailure
from triptych_vllm_connector.scheduler.kv_owner import is_of_prompt

MAX_REMEMBERED = 16_384  # KV caches that were read last


def covers_items(mm_features: Sequence[Any], num_computed_tokens: int, num_tokens: int) -> bool:
    """True if the KV cache covers every item of `mm_features` (vLLM's).

    vLLM computes the last token again where all of them are there.
    """
    first = min(num_computed_tokens, num_tokens - 1)
    return not any(_has_embeds_from(feature.mm_position, first) for feature in mm_features)


def _has_embeds_from(position: Any, first_token: int) -> bool:
    start = max(0, first_token - position.offset)
    if start >= position.length:
        return False
    first_embed, end_embed = position.get_embeds_indices_in_range(start, position.length)
    return bool(end_embed > first_embed)


class KvReads:
    """KV caches that requests have named; each may be read once."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._named: OrderedDict[tuple[str, str], None] = OrderedDict()

    def name(self, params: dict[str, Any]) -> bool:
        """Record the KV cache that `kv_transfer_params` name; False if a request has named it before."""
        key = (str(params.get("remote_engine_id")), str(params.get("remote_request_id")))
        if key in self._named:
            return False
        self._named[key] = None
        if len(self._named) > self._max_remembered:
            self._named.popitem(last=False)
        return True


class KvRefusals:
    """Of one engine. Requests by engine request id."""

    def __init__(self) -> None:
        self._reads = KvReads()
        self._failures: dict[str, KvFailure] = {}  # of living requests

    def __len__(self) -> int:
        """Living requests that are to end."""
        return len(self._failures)

    def on_added(
        self, engine_request_id: str, params: dict[str, Any] | None, token_ids: Sequence[int] | None
    ) -> KvFailure | None:
        """Why it is to end; None: nothing is known against it yet.

        Args:
            params: its `kv_transfer_params`. Of a KV cache that is another's to read they ask for none
                afterwards: vLLM's connector would tell the owner to free it.
            token_ids: of its prompt; None: it has none, or is aborted as it comes.
        """
        if not params or not params.get("do_remote_prefill"):
            return None
        failure: KvFailure | None = None
        if not self._reads.name(params):
            params["do_remote_prefill"] = False
            failure = KvFailure.KV_TAKEN
        elif not is_of_prompt(params, token_ids):
            failure = KvFailure.KV_LOAD_FAILED
        if failure is not None:
            self._failures[engine_request_id] = failure
        return failure

    def check(
        self, engine_request_id: str, mm_features: Sequence[Any], num_computed_tokens: int, num_tokens: int
    ) -> KvFailure | None:
        """Before it gets KV blocks: why it is to end; None: it may go on from this KV cache."""
        failure = self._failures.get(engine_request_id)
        if failure is None and not covers_items(mm_features, num_computed_tokens, num_tokens):
            failure = self._failures[engine_request_id] = KvFailure.PREFIX_NOT_HELD
        return failure

    def on_load_failed(self, engine_request_ids: Iterable[str]) -> None:
        """What they name could not be read, or not within its lease."""
        self._failures |= dict.fromkeys(engine_request_ids, KvFailure.KV_LOAD_FAILED)

    def take(self, engine_request_id: str) -> KvFailure | None:
        """Why it has ended; None: not for this. It is forgotten."""
        return self._failures.pop(engine_request_id, None)
