"""Which engine gets which GPU, how much of its memory, and which limits under MPS."""

import pytest

from triptych_common.cores.gpu_plan import (
    ENCODER,
    ENCODER_SHARE,
    PREFILL_DECODE,
    SMALLEST_SHARE,
    UNCOUNTED_SHARE,
    EngineKind,
    GpuPlace,
    MpsLimits,
    default_slab_bytes,
    memory_shares,
    mps_limits,
    place_engines,
    plan_gpus,
)
from triptych_common.cores.plan import CorePolicy

E, P = ENCODER, PREFILL_DECODE


@pytest.mark.parametrize(
    ("num_encoders", "num_prefill_decodes", "num_gpus", "numbers"),
    [
        (1, 1, 1, [0, 0]),
        (1, 1, 2, [0, 1]),
        (1, 1, 8, [0, 1]),
        (2, 1, 2, [0, 0, 1]),  # encoders share with each other before they share with text
        (3, 1, 3, [0, 1, 0, 2]),
        (2, 2, 3, [0, 0, 1, 2]),
        (1, 2, 2, [0, 1, 0]),
        (1, 3, 2, [0, 1, 0, 1]),
        (0, 2, 1, [0, 0]),
        (0, 2, 3, [0, 1]),
    ],
)
def test_places(num_encoders: int, num_prefill_decodes: int, num_gpus: int, numbers: list[int]) -> None:
    placed = place_engines(num_encoders, num_prefill_decodes, num_gpus)
    assert placed == [(number,) for number in numbers]


@pytest.mark.parametrize("num_encoders", range(5))
@pytest.mark.parametrize("num_prefill_decodes", range(1, 5))
@pytest.mark.parametrize("num_gpus", range(1, 9))
def test_engines_share_only_where_gpus_are_too_few(
    num_encoders: int, num_prefill_decodes: int, num_gpus: int
) -> None:
    numbers = [number for (number,) in place_engines(num_encoders, num_prefill_decodes, num_gpus)]
    assert len(numbers) == num_encoders + num_prefill_decodes
    assert set(numbers) <= set(range(num_gpus))
    assert len(set(numbers)) == min(num_gpus, len(numbers)), "none is idle while others are shared"
    text = set(numbers[num_encoders:])
    if num_gpus > num_prefill_decodes:
        assert len(text) == num_prefill_decodes
        assert text.isdisjoint(numbers[:num_encoders])


def test_parts_of_gpus_are_taken_as_they_are_named() -> None:
    gpus = ("MIG-2f2c", "GPU-81b0")
    assert plan_gpus(1, 1, gpus, "split") == [
        GpuPlace(("MIG-2f2c",), 1, None, MpsLimits()),
        GpuPlace(("GPU-81b0",), 1, None, MpsLimits()),
    ]


@pytest.mark.parametrize("num_encoders", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("num_others", [1, 2, 3])
@pytest.mark.parametrize("slab_share", [0.0, 0.02, 0.3])
def test_parts_of_a_gpu_leave_memory_for_what_vllm_does_not_count(
    num_encoders: int, num_others: int, slab_share: float
) -> None:
    shares = memory_shares([E] * num_encoders + [P] * num_others, slab_share)
    assert shares[:num_encoders] == [ENCODER_SHARE] * num_encoders
    if min(shares[num_encoders:]) > SMALLEST_SHARE:
        assert sum(shares) + slab_share + UNCOUNTED_SHARE <= 1.0 + 1e-9
        assert sum(shares) + slab_share + UNCOUNTED_SHARE > 1.0 - 0.01 * num_others - 1e-9
    assert all(0 < share < 1 for share in shares)


@pytest.mark.parametrize(
    ("counts", "widths", "num_gpus", "placed"),
    [
        ((1, 1), (1, 2), 2, [(0,), (0, 1)]),  # too few for both: text is beside the encoder on one
        ((1, 1), (1, 2), 3, [(0,), (1, 2)]),
        ((2, 1), (1, 2), 4, [(0,), (1,), (2, 3)]),
        ((3, 1), (1, 2), 4, [(0,), (1,), (0,), (2, 3)]),
        ((1, 2), (1, 2), 4, [(0,), (1, 2), (0, 3)]),
        ((1, 1), (2, 2), 4, [(0, 1), (2, 3)]),
        ((0, 2), (1, 2), 4, [(0, 1), (2, 3)]),
        ((0, 1), (1, 8), 2, [(0, 1)]),  # vLLM refuses more than there are with its own words
    ],
)
def test_an_engine_over_several_gpus_has_a_place_on_each(
    counts: tuple[int, int], widths: tuple[int, int], num_gpus: int, placed: list[tuple[int, ...]]
) -> None:
    encoder_width, text_width = widths
    assert (
        place_engines(*counts, num_gpus, encoder_width=encoder_width, prefill_decode_width=text_width)
        == placed
    )


def test_an_engine_over_several_gpus_takes_no_more_of_any_than_the_fullest_has() -> None:
    """vLLM has one share for all of them: 0.92 beside an encoder that has 0.92 would not fit."""
    encoder, text = plan_gpus(1, 1, ("0", "1"), "split", slab_share=0.02, prefill_decode_width=2)
    assert encoder == GpuPlace(("0",), 2, 0.10, MpsLimits(50))
    assert text == GpuPlace(("0", "1"), 2, 0.73, MpsLimits(50))
    _, *texts = plan_gpus(1, 2, ("0", "1"), "split", prefill_decode_width=2)
    assert texts == [GpuPlace(("0", "1"), 3, 0.37, MpsLimits(33))] * 2, "0.42 would fit the second GPU alone"


@pytest.mark.parametrize(("gpu_gib", "slab_bytes"), [(8, 256 << 20), (24, 490 << 20), (80, 1638 << 20)])
def test_the_slab_is_a_small_part_of_the_gpu_in_whole_pages(gpu_gib: int, slab_bytes: int) -> None:
    assert default_slab_bytes(gpu_gib << 30) == slab_bytes


PERCENTAGE, PRIORITY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY"


@pytest.mark.parametrize(
    ("policy", "kinds", "environments"),
    [
        ("split", [E, P], [{PERCENTAGE: "50"}, {PERCENTAGE: "50"}]),
        ("split", [E, E, P], [{PERCENTAGE: "33"}] * 3),
        ("text_first", [E, P], [{PRIORITY: "1"}, {PRIORITY: "0"}]),
        ("image_first", [E, P], [{PRIORITY: "0"}, {PRIORITY: "1"}]),
        ("text_first", [E, E], [{}, {}]),  # neither is behind the other
        ("split", [E, E], [{PERCENTAGE: "50"}] * 2),
        ("split", [E], [{}]),  # its own GPU
        ("text_first", [P], [{}]),
        ("text_first", [], []),
    ],
)
def test_limits(policy: CorePolicy, kinds: list[EngineKind], environments: list[dict[str, str]]) -> None:
    assert [limit.environment() for limit in mps_limits(policy, kinds)] == environments
