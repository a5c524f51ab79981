"""Who calls a model's own processor for media, and with which: in a file that a test has named.

`preload` imports it, so it is in every process that is forked. Without the variable nothing is written.

    PROCESSING_CALLS=FILE: a line for each call: the process' id, the kinds of media with commas between them
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.processing.context import InputProcessingContext

FILE_VARIABLE = "PROCESSING_CALLS"
MEDIA = frozenset({"images", "videos", "audio"})  # as processors call them
_call = InputProcessingContext.call_hf_processor


def _noted_call(
    self: InputProcessingContext, processor: Any, data: Mapping[str, object], *args: Any, **kwargs: Any
) -> Any:
    """In front of the one method by which vLLM calls any model's processor."""
    file, kinds = os.environ.get(FILE_VARIABLE), MEDIA & data.keys()
    if file is not None and kinds:
        with Path(file).open("a") as calls:
            calls.write(f"{os.getpid()} {','.join(sorted(kinds))}\n")
    return _call(self, processor, data, *args, **kwargs)


InputProcessingContext.call_hf_processor = _noted_call
