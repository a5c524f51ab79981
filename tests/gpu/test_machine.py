"""What this machine has; without a GPU, the reason why nothing else of this folder was tried."""

import pytest

from tests.support.cuda.gpu import why_no_gpu


def test_there_is_a_gpu_and_what_else_these_tests_need() -> None:
    if (reason := why_no_gpu()) is not None:
        pytest.skip(reason)
    from triptych_common.region.cuda.loading import load_driver

    assert load_driver().device_uuid().startswith("GPU-")
