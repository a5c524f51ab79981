"""Encoders that follow a tenfold burst: goodput and encoder-hours of fixed numbers and of scalers.

The trace has two bursts, so that a cooldown may be too short. Goodput counts the requests whose first token
comes within the objective; for the rest the encoders had too much to do, or were starting. `INTERVALS_S`: the
supervisor of one machine looks each second, an autoscaler of Kubernetes every 15 s.
"""

from dataclasses import dataclass
from pathlib import Path

from simulation.charts import Line, line_chart
from simulation.parameters import StageTimes
from simulation.results import Results
from simulation.studies import chat, header, triptych
from simulation.system import Scaling, simulate
from simulation.workload import Arrivals, Stream, Workload
from triptych_cli.roles import Bounds
from triptych_cli.supervisor.autoscaler import ScalingRules

BASE_RATE, BURST_FACTOR = 6.0, 10.0  # requests/s with an image each
BURSTS = ((300.0, 480.0), (660.0, 840.0))  # seconds
SECONDS = 1440.0
WARM_S = 60.0
NUM_PREFILL_DECODES = 7  # enough for the burst: encoders are what is short
MAX_ENCODERS = 4
START_S = 60.0  # of an encoder, from its order to its first job
GOAL_S = 1.5  # of a first token
FIXED = (1, 2, 3, 4)
TARGETS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
COOLDOWNS_S = (30.0, 60.0, 120.0, 180.0, 300.0)
INTERVALS_S = {"supervisor": 1.0, "Kubernetes": 15.0}
FEWEST = (0, 1, 2, 3)
STARTS_S = (10.0, 30.0, 60.0, 120.0)
TARGET_S, COOLDOWN_S = 1.0, 180.0  # where another one is varied
KIND = chat(1, tokens=4)
COLUMNS = (f"requests within {GOAL_S:g} s", "first token p50, ms", "p99, s", "encoder-hours")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one way of having encoders."""

    name: str
    results: Results

    @property
    def good_share(self) -> float:
        """Share of all requests with a first token within the objective."""
        times = self.results.ttft_s[KIND.name]
        return sum(each <= GOAL_S for each in times) / max(1, len(times) + self.results.num_unanswered)

    @property
    def encoder_hours(self) -> float:
        return self.results.encoder_s / 3600

    @property
    def point(self) -> tuple[float, float]:
        return self.encoder_hours, 100 * self.good_share

    def row(self) -> str:
        return (
            f"| {self.name} | {self.good_share:.1%} | {self.results.ttft_ms(0.5):.0f} "
            f"| {self.results.ttft_ms(0.99) / 1e3:.1f} | {self.encoder_hours:.2f} |"
        )


def trace() -> Workload:
    burst = [
        Stream(KIND, Arrivals.POISSON, rate=BASE_RATE * (BURST_FACTOR - 1), begins_s=begin, ends_s=end)
        for begin, end in BURSTS
    ]
    return Workload([Stream(KIND, Arrivals.POISSON, rate=BASE_RATE), *burst], SECONDS)


def fixed(times: StageTimes, number: int) -> Outcome:
    deployment = triptych([(number, NUM_PREFILL_DECODES)])
    return Outcome(f"{number}, fixed", simulate(times, deployment, trace(), warm_s=WARM_S))


def scaled_by(
    times: StageTimes,
    name: str,
    *,
    target_s: float = TARGET_S,
    cooldown_s: float = COOLDOWN_S,
    low: int = 1,
    interval_s: float = 1.0,
    start_s: float = START_S,
) -> Outcome:
    """Run the trace with a scaler whose cooldown is as it is given, whatever a start takes."""
    rules = ScalingRules(target_s, cooldown_s, cooldown_starts=0.0)
    scaling = Scaling(rules, Bounds(low, MAX_ENCODERS), interval_s, start_s)
    deployment = triptych([(MAX_ENCODERS, NUM_PREFILL_DECODES)])
    return Outcome(name, simulate(times, deployment, trace(), warm_s=WARM_S, scaling=scaling))


def scale_out(times: StageTimes, charts: Path | None) -> list[str]:
    """Return the tables; with `charts`, draw goodput over encoder-hours."""
    groups = {"encoders": [fixed(times, number) for number in FIXED]}
    for who, interval_s in INTERVALS_S.items():
        groups[who] = [
            scaled_by(
                times, f"target {each:g} s, each {interval_s:g} s", target_s=each, interval_s=interval_s
            )
            for each in TARGETS_S
        ]
    groups["cooldown"] = [scaled_by(times, f"{each:g} s", cooldown_s=each) for each in COOLDOWNS_S]
    groups["fewest"] = [scaled_by(times, f"{each}..{MAX_ENCODERS}", low=each) for each in FEWEST]
    groups["start"] = [scaled_by(times, f"{each:g} s", start_s=each) for each in STARTS_S]
    lines: list[str] = []
    for title, outcomes in groups.items():
        lines += [*header(title, *COLUMNS), *(each.row() for each in outcomes), ""]
    if charts is not None:
        drawn: list[Line] = [
            ("fixed", [each.point for each in groups["encoders"]]),
            ("by target", [each.point for each in groups["supervisor"]]),
            ("by cooldown", [each.point for each in groups["cooldown"]]),
            ("by fewest", [each.point for each in groups["fewest"]]),
        ]
        chart = line_chart(
            "A tenfold burst, twice: requests in time over encoder-hours (model)",
            "encoder-hours",
            f"% within {GOAL_S:g} s",
            drawn,
            y_max=100.0,
        )
        (charts / "scaling-out.svg").write_text(chart)
    return lines
