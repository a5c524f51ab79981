"""Where a control daemon of NVIDIA's Multi-Process Service is looked for."""

from pathlib import Path

import pytest

from triptych_common.cores.mps import CudaEnvironment, has_mps_daemon


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path


def test_the_daemon_has_a_socket_in_its_directory(pipes: Path) -> None:
    assert not has_mps_daemon()
    (pipes / "control").touch()
    assert has_mps_daemon()


def test_cudas_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")
    assert CudaEnvironment().cuda_mps_pipe_directory == Path("/tmp/nvidia-mps")
