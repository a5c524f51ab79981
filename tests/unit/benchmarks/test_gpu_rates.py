"""The GPU benchmark's arithmetic, and its run on a fake GPU. No rates asserted."""

import pytest
from gpu_rates.measuring import MIB, Compared, Figure, Passage, figure, fit_table, fits, gb_s, report, table


def test_ratios_are_to_the_copy_that_goes_the_same_way() -> None:
    rates = {"device to host": 20.0, "host to device": 25.0, "device copy": 2000.0}
    passage = Passage(write_s=1e-3, told_s=2e-4, open_s=8e-4)
    pinned = figure("pinned_shm", 16, [passage], Compared("device to host", "host to device"), rates)
    assert pinned.write_gb_s == pytest.approx(16.777216)
    assert pinned.out_ratio == pytest.approx(16.777216 / 20)
    assert pinned.in_ratio == pytest.approx(20.97152 / 25)
    ipc = figure("cuda_ipc", 16, [Passage(8.4e-6, 2e-4, 1e-5)], Compared("device copy", None), rates)
    assert ipc.out_ratio == pytest.approx(0.9986, abs=1e-3)
    lines = table([pinned, ipc]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "none needed" not in lines[2]
    assert "none needed" in lines[3]


def figure_of(mib: float, write_s: float, plain_s: float) -> Figure:
    passage = Passage(write_s, 0.0, 0.0 + write_s)
    return figure(
        "cuda_ipc", mib, [passage], Compared("device copy", None), {"device copy": gb_s(mib, plain_s)}
    )


SIZES = (1, 16, 64, 128, 256)


def figures_of(fixed_s: float, rate: float, plain_fixed_s: float, plain_rate: float) -> list[Figure]:
    """A way and a plain copy that take a fixed time, and one for each byte. Rates in bytes a second."""
    return [
        figure_of(mib, fixed_s + mib * MIB / rate, plain_fixed_s + mib * MIB / plain_rate) for mib in SIZES
    ]


def test_the_fixed_cost_of_a_call_is_reported_and_not_judged() -> None:
    """60 us of Python and events are more than a copy of 64 MiB takes on the device."""
    figures = figures_of(80e-6, 1.25e12, 20e-6, 1.3e12)
    (fit,) = fits(figures)
    assert figures[2].out_ratio < 0.6
    assert fit.fixed_us == pytest.approx(80)
    assert fit.plain_fixed_us == pytest.approx(20)
    assert fit.ratio == pytest.approx(1.25 / 1.3)
    assert fit.reaches_target
    assert report({}, figures)["fits"][0]["reaches_target"]
    lines = fit_table([fit]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "reached" in lines[-1]


def test_sizes_below_64_mib_do_not_count_and_one_size_is_no_line() -> None:
    small = figure_of(1, 1.0, 1e-6)
    figures = figures_of(0.0, 1.0e12, 0.0, 1.0e12)
    assert fits([small, *figures[1:]])[0].ratio == pytest.approx(1.0)
    assert fits([*figures[:3]]) == []
    falling = [figure_of(64, 2.0, 1.0), figure_of(128, 1.0, 2.0)]
    assert fits(falling) == [], "noise is no rate"
