"""The gateway's benchmark: its arithmetic."""

from gateway_bench.arms import DIRECT, GATEWAY, PROXY
from gateway_bench.load import Times
from gateway_bench.redis_counts import _names
from gateway_bench.report import bars_of
from gateway_bench.rounds import _figures, workloads


def test_names_of_the_commands_in_one_write() -> None:
    written = b"*2\r\n$3\r\nget\r\n$7\r\n*1\r\n$1x\r\n*1\r\n$4\r\nPING\r\n"
    assert [*_names(written)] == ["GET", "PING"]


def test_bars_compare_what_was_added() -> None:
    plans = workloads()
    times = {
        DIRECT: Times([1.0] * 3, [2.0] * 3, [100.0], [0.0]),
        PROXY: Times([1.5] * 3, [2.5] * 3, [80.0], [0.2]),
        GATEWAY: Times([1.9] * 3, [2.9] * 3, [40.0], [0.5]),
    }
    figures = [_figures(plan, arm, times[arm], times[DIRECT]) for plan in plans for arm in times]
    bars = bars_of(figures)
    assert len(bars) == 12
    assert {(round(bar.measured, 3), bar.is_met) for bar in bars} == {
        (0.9, True), (1.8, True), (0.5, True), (0.4, False),
    }  # fmt: skip
