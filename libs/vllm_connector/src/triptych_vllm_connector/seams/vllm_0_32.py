"""Seams of vLLM 0.32, where they differ from another supported version's."""

from collections.abc import Callable, Mapping
from typing import Any

READS_METADATA_APART = False
"""True if vLLM reads a video's metadata from a capture of its own, and counts the frames of a stream, whose
header has no number of them."""


def cli_args() -> Any:
    """Import vLLM's module of its server's options."""
    from vllm.entrypoints.launchers import cli_args

    return cli_args


def content_parser() -> tuple[Any, Any]:
    """Return vLLM's class that parses content parts, and its function that makes one."""
    from vllm.renderers.chat_utils import AsyncMultiModalContentParser, AsyncMultiModalItemTracker

    return AsyncMultiModalContentParser, AsyncMultiModalItemTracker.create_parser


def message_reader() -> Any:
    """Return the method of vLLM's message queue that waits for a message."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue.acquire_read


def add_cached_input(manager: Any, engine_request_id: str, input_id: int, mm_hash: str) -> None:
    """Record in vLLM's `EncoderCacheManager` that a request uses an entry."""
    manager.request_cached_ids.setdefault(engine_request_id, set()).add(input_id)


def local_prefill_interval(scheduler: Any) -> int:
    """Steps between two that compute prompts while others decode, as vLLM's scheduler keeps them."""
    return 1


def tokenizer_infos(backend: Any) -> tuple[Any, Any]:
    """xgrammar's `TokenizerInfo`s of vLLM's `XgrammarBackend`: of most grammars, and of those that may name
    special tokens (Lark, structural tags)."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    info = backend.compile_grammar(StructuredOutputOptions.JSON_OBJECT, "").ctx.tokenizer_info
    return info, info


def replace_frame_count(count: Callable[[bytes], int]) -> Callable[[bytes], int]:
    """Replace vLLM's way to count the frames of a stream; returns vLLM's own, which has none."""
    return count


def retry_instead(outputs: Mapping[int, Any], cause: str) -> None:
    """Make errors with `cause` in their message, in EngineCore's outputs by client, errors to retry; vLLM
    gives none a message."""


def try_no_grammars() -> None:
    """Keep callers' schemas away from xgrammar where vLLM's parsers of tool calls would try whether they
    compile; none does."""
