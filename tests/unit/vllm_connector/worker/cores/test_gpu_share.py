"""What a worker says of its GPU: as the driver does, whatever was planned."""

import logging

import pytest
from torch import nn, zeros

from tests.support.cuda.fake_cuda import UUID, FakeDriver, FakeGpu
from triptych_common.cores.mps import CudaEnvironment
from triptych_common.cores.sharing import Work
from triptych_common.protocol.messages import Compute, Sharing
from triptych_common.region.cuda.driver import CudaError
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores import opening
from triptych_vllm_connector.worker.cores.compute_share import FixedShare
from triptych_vllm_connector.worker.cores.opening import gpu_compute, gpu_share, open_share

CUDA_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
)


@pytest.fixture(autouse=True)
def no_variables_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUDA_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shared(config: ConnectorConfig, num_engines: int = 2) -> ConnectorConfig:
    return config.model_copy(update={"gpu_engines": num_engines})


def driver(*, is_shared_by_mps: bool, num_multiprocessors: int = 132) -> FakeDriver:
    return FakeDriver(FakeGpu(is_shared_by_mps=is_shared_by_mps, num_multiprocessors=num_multiprocessors))


def test_under_mps_the_policy_and_the_limits_are_named(config: ConnectorConfig) -> None:
    environment = CudaEnvironment(
        cuda_visible_devices="3", cuda_mps_active_thread_percentage="50", cuda_mps_client_priority="1"
    )
    with_mps = driver(is_shared_by_mps=True, num_multiprocessors=66)
    assert gpu_compute(shared(config), with_mps, environment) == Compute(
        sharing=Sharing.MPS,
        policy="text_first",
        gpu="3",
        num_engines=2,
        num_multiprocessors=66,
        thread_percentage="50",
        priority="1",
    )


def test_under_mps_without_limits_no_policy_has_an_effect(config: ConnectorConfig) -> None:
    """As for engines of one kind, or one that is started by hand."""
    compute = gpu_compute(shared(config), driver(is_shared_by_mps=True), CudaEnvironment())
    assert (compute.sharing, compute.policy) == (Sharing.MPS, None)


def test_without_mps_no_policy_has_an_effect(config: ConnectorConfig) -> None:
    compute = gpu_compute(shared(config), driver(is_shared_by_mps=False), CudaEnvironment())
    assert (compute.sharing, compute.policy, compute.gpu) == (Sharing.TIME_SLICES, None, UUID)
    alone = gpu_compute(shared(config, 1), driver(is_shared_by_mps=False), CudaEnvironment())
    assert (alone.sharing, alone.policy) == (Sharing.NONE, None)


def test_a_daemon_that_did_not_answer_is_reported(
    config: ConnectorConfig, caplog: pytest.LogCaptureFixture
) -> None:
    environment = CudaEnvironment(cuda_mps_client_priority="1")
    share = gpu_share(shared(config), driver(is_shared_by_mps=False), environment)
    assert share.compute.sharing is Sharing.TIME_SLICES
    assert share.compute.priority is None, "it has none"
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == ["limits of MPS have no effect"]


class RefusingDriver(FakeDriver):
    def is_mps_client(self) -> bool:
        raise CudaError("cudaDeviceGetAttribute: refused")


def test_a_driver_that_cannot_be_asked_leaves_it_unknown(config: ConnectorConfig) -> None:
    assert gpu_compute(shared(config), None, CudaEnvironment()).sharing is Sharing.UNKNOWN
    assert (
        gpu_compute(shared(config), RefusingDriver(FakeGpu()), CudaEnvironment()).sharing is Sharing.UNKNOWN
    )


def test_a_gpus_layers_stay_as_they_are(config: ConnectorConfig) -> None:
    """vLLM may compile or capture them."""
    share = gpu_share(config, driver(is_shared_by_mps=False), CudaEnvironment())
    model = nn.Sequential()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    share.watch_layers(model)
    assert "forward" not in vars(model.layers[0])
    share.start_step(Work.ENCODE)
    model.layers[0](zeros(1, 2))
    share.start_layer()
    share.end_step()
    assert share.range is None


def test_the_platform_chooses(config: ConnectorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_driver", lambda: driver(is_shared_by_mps=True))
    on_gpu = open_share(config, "cuda", 1)
    assert isinstance(on_gpu, FixedShare)
    assert on_gpu.compute.gpu == UUID
    on_cpu = open_share(config, "cpu", 1)
    assert on_cpu.compute == Compute(sharing=Sharing.NONE)


def test_split_cores_are_named_with_the_policy(config: ConnectorConfig) -> None:
    split = config.model_copy(update={"core_policy": "split", "cores": (0,)})
    assert open_share(split, "cpu", 1).compute == Compute(sharing=Sharing.NONE, policy="split", cores=(0,))
