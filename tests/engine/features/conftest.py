"""A second pair of engines: what needs options of vLLM's own, all of them in one engine."""

import shlex
from collections.abc import Iterator

import pytest

from tests.support.real.adapters import Adapters, make_adapter
from tests.support.real.engine_options import OPTIONS
from tests.support.real.system import EXACT, MODEL, Server, System, running_monolith, running_system


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    return Adapters(make_adapter(folder / "french", MODEL, 1), make_adapter(folder / "dutch", MODEL, 2))


@pytest.fixture(scope="session")
def equipped(adapters: Adapters) -> Iterator[System]:
    with running_system(
        f"--encoder-args={shlex.join(EXACT)}",
        f"--prefill-decode-args={shlex.join([*EXACT, *OPTIONS, *adapters.options()])}",
        TRIPTYCH_OVERLAP_MIN_TOKENS="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        is_forked=True,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def equipped_monolith(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("equipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with running_monolith(folder, *OPTIONS, *adapters.options(), is_forked=True) as running:
            yield running
