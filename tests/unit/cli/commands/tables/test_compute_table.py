"""What `status` says of an engine's cores or GPU."""

import pytest

from triptych_cli.commands.status_tables import describe_place, describe_sharing
from triptych_common.protocol.messages import Compute, Sharing


@pytest.mark.parametrize(
    ("compute", "place", "sharing"),
    [
        (Compute(sharing=Sharing.CORES, policy="text_first", cores=(8, 0, 1, 2)), "cores 0-2,8", "cores"),
        (Compute(sharing=Sharing.NONE), "CPU", "none"),
        (
            Compute(sharing=Sharing.NONE, gpu="1", num_multiprocessors=132),
            "GPU 1, 132 multiprocessors",
            "none",
        ),
        (
            Compute(
                sharing=Sharing.MPS, gpu="0", num_engines=2, num_multiprocessors=66, thread_percentage="50"
            ),
            "GPU 0, 66 multiprocessors",
            "mps with 1 other, 50 % of the threads at most",
        ),
        (
            Compute(sharing=Sharing.MPS, gpu="MIG-1", num_engines=3, priority="1"),
            "MIG-1",
            "mps with 2 others, below normal",
        ),
        (
            Compute(sharing=Sharing.MPS, gpu="GPU-1", num_engines=2, priority="0"),
            "GPU-1",
            "mps with 1 other, normal",
        ),
        (Compute(sharing=Sharing.TIME_SLICES, gpu="0", num_engines=2), "GPU 0", "time_slices with 1 other"),
    ],
)
def test_an_engine(compute: Compute, place: str, sharing: str) -> None:
    assert (describe_place(compute), describe_sharing(compute)) == (place, sharing)
