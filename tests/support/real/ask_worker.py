"""A process with a real encoder's engine on the CPU, whose host asks the worker for the store's slab.

Arguments: SOCKET MODEL. Prints the answer as JSON on its last line.
"""

import asyncio
import json
import sys
from pathlib import Path

from tests.support.real.system import small_dummies
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_encoder.encoding import PreprocessLimits
from triptych_encoder.engine.encode_engine import run_engine
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import encoder_options


async def main() -> None:
    socket, model = sys.argv[1:]
    config = ConnectorConfig(
        instance="encoder-0",
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=Path(socket),
        namespace_digest="0" * 64,
        has_encoder=True,
    )
    options = encoder_options(
        config, model, 1, on_gpu=False, passed_through=["--max-model-len=1024", *small_dummies(Path(model))]
    )
    limits = PreprocessLimits(
        image_formats=("PNG",),
        max_image_pixels=1_000_000,
        processor_options={},
        media_options={},
        video=VideoBounds(60.0, 1_000_000, 1_000_000, 1_000_000),
        audio=AudioBounds(60.0, 1_000_000),
        timeout_s=60.0,
        num_pixels=1_000_000,
        num_threads=2,
        stuck_after_s=60.0,
    )
    async with run_engine(options, limits) as engine:
        answer = await engine.probe_slab()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
