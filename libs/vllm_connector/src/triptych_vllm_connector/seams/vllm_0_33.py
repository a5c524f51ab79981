"""Seams of vLLM 0.33, by the names and meanings of `vllm_0_32`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from triptych_vllm_connector.seams.replacing import replace, require_names

READS_METADATA_APART = True


def cli_args() -> Any:
    """Import vLLM's module of its server's options."""
    from vllm.entrypoints.common import cli_args

    return cli_args


def content_parser() -> tuple[Any, Any]:
    """Return the class, which the tracker's module has imported by name, and the function there."""
    from vllm.renderers.chat_utils.content_parser import AsyncMultiModalContentParser
    from vllm.renderers.chat_utils.item_tracker import AsyncMultiModalItemTracker

    return AsyncMultiModalContentParser, AsyncMultiModalItemTracker.create_parser


def message_reader() -> Any:
    """Return the method of vLLM's message queue that waits for a message."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue._wait_until_readable


def add_cached_input(manager: Any, engine_request_id: str, input_id: int, mm_hash: str) -> None:
    """Record the use by vLLM's own method, which counts references by hash, too."""
    manager._add_cached_input_id(engine_request_id, input_id, mm_hash)


def local_prefill_interval(scheduler: Any) -> int:
    """`--prefill-schedule-interval` of an engine without data parallelism."""
    return int(scheduler.local_prefill_interval)


def tokenizer_infos(backend: Any) -> tuple[Any, Any]:
    """vLLM compiles most grammars for a vocabulary without special tokens, which no JSON may contain."""
    return tuple(
        compiler.compile_builtin_json_grammar().tokenizer_info
        for compiler in (backend.compiler, backend.full_vocab_compiler)
    )


def replace_frame_count(count: Callable[[bytes], int]) -> Callable[[bytes], int]:
    """Replace `demux_count_frames`, which opens the video in this process."""
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin as Reader

    require_names((Reader.get_video_metadata,), "open_video_capture")
    users = (Reader.get_video_metadata,)
    original: Callable[[bytes], int] = replace(
        Reader, "demux_count_frames", staticmethod(count), used_by=users
    )
    return original


def retry_instead(outputs: Mapping[int, Any], cause: str) -> None:
    """vLLM takes a grammar that failed in EngineCore for a fault of the request, and answers 400."""
    for of_client in outputs.values():
        for each in of_client.outputs:
            if each.error is not None and cause in each.error.message:
                each.error = dataclasses.replace(
                    each.error, code="internal_error", message=cause, retryable=True
                )


def try_no_grammars() -> None:
    """Have parsers with response templates take tools' schemas untried: the compile server refuses a
    structural tag with one that does not compile."""
    from vllm.parser import response_template_grammar as grammar

    replace(grammar, "_regex_compiles", _accept, used_by=(grammar._string_regex,))
    replace(grammar, "_json_compiles", _accept, used_by=(grammar._json_format,))


def _accept(text: str) -> bool:
    return True
