"""What the server imports, and which variables of the environment were read meanwhile.

A process whose values of these are others would have imported something else: it is not forked.
"""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych_cli.system.engines import CPU_ENGINE_ENV, ENGINE_ENV

ENVIRONMENT = {**ENGINE_ENV, **CPU_ENGINE_ENV, "HF_HUB_OFFLINE": "1"}
"""The server's own, over that of the tests: as a service of theirs has it."""

LAUNCHER = "triptych_cli"
LIGHT = frozenset({LAUNCHER, "triptych_cache_store", "triptych_fabric", "triptych_gateway"})
"""Without torch: what the environment sets for its libraries means nothing to them."""
ENGINES = frozenset(
    {
        "triptych_encoder",
        "triptych_prefill_decode",
        "vllm.entrypoints.openai.api_server",
        "tests.support.families.answer_alone",
        "tests.support.real.ask_worker",
        "tests.support.real.batches",
    }
)
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "triptych_cli.app",
    "triptych_cli.supervisor.daemon",
    "triptych_cache_store.service",
    "triptych_gateway.service",
    "uvicorn.lifespan.off",  # imported when they are used first, as those at the end
    "uvicorn.protocols.http.httptools_impl",
    "triptych_encoder.service",
    "triptych_encoder.engine.encode_engine",
    "triptych_prefill_decode.service",
    "triptych_vllm_connector.connector",
    # What vLLM and transformers import when they are used first:
    "compressed_tensors",
    "mistral_common.tokens.tokenizers.mistral",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.tokenization_mistral_common",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.renderers.hf",
    "xgrammar",
    "tests.support.real.warm.processing_calls",
    "tests.support.real.warm.unchecked_items",
)
BY_LIBRARIES = ("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_")  # read before any Python
BY_PYTHON = ("PYTHON",)
ANY_VALUE = frozenset(
    {
        "LD_LIBRARY_PATH",  # set by cv2 wherever it is imported; of use to a new program only
        "PYTEST_CURRENT_TEST",  # read by nobody, and copied with all others
        "TORCHINDUCTOR_CACHE_DIR",  # read again by each compilation; some imports set it where it is not
        "TMPDIR",  # forgotten after the fork
        "VLLM_SERVER_DEV_MODE",  # at the import, the default of an option: whether errors are logged in full
    }
)


class _Noted(dict[bytes, bytes]):
    """The environment's own dictionary, which notes what is asked for."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: bytes) -> bytes:
        self.names.add(os.fsdecode(name))
        return super().__getitem__(name)


class Preloaded:
    """Everything is imported; nothing that a fork would break was started."""

    def __init__(self) -> None:
        self._values = dict(os.environ)
        environment: Any = os.environ
        data: dict[bytes, bytes] = environment._data
        noted = environment._data = _Noted(data)
        try:
            for module in MODULES:
                importlib.import_module(module)
        finally:
            data.clear()
            data.update(noted)
            environment._data = data
        self._names = noted.names
        self.changes = {name: value for name, value in os.environ.items() if self._values.get(name) != value}
        """What the imports have set."""

    @property
    def num_threads(self) -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def differing(self, module: str, environment: Mapping[str, str]) -> list[str]:
        """Names of variables with which `module` would have been imported in another way."""
        names = {*self._values, *environment}
        counting = {name for name in names if name.startswith(BY_PYTHON)}
        if module not in LIGHT:
            counting |= {name for name in names if name.startswith(BY_LIBRARIES)} | self._names
        return sorted(
            name for name in counting - ANY_VALUE if self._values.get(name) != environment.get(name)
        )
