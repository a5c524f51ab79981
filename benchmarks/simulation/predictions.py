"""Predicted beside measured: the same workload in the model and on the real system."""

from dataclasses import dataclass

from simulation.calibration import FITTED
from simulation.parameters import Deployment, StageTimes
from simulation.real_runs import Measured, RealRun
from simulation.results import percentile
from simulation.system import simulate
from simulation.workload import Workload

NUM_SEEDS = 5


@dataclass(frozen=True)
class Comparison:
    """One figure. `error`: predicted ÷ measured − 1."""

    workload: str
    kind: str
    figure: str
    is_fitted: bool
    num_measured: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def compare(
    times: StageTimes, deployment: Deployment, workloads: dict[str, Workload], run: RealRun
) -> list[Comparison]:
    """TTFT p50 and p90 of each kind of request (ms), and requests/s of each workload."""
    rows: list[Comparison] = []
    for name, workload in workloads.items():
        measured = run.measured.get(name)
        if not measured:
            continue
        played = [simulate(times, deployment, workload, seed=seed) for seed in range(NUM_SEEDS)]
        for kind in dict.fromkeys(kind.name for kind in workload.kinds):
            real = [each for each in measured if each.kind == kind]
            model = [value for results in played for value in results.ttft_s[kind]]
            rows += [
                Comparison(
                    name, kind, f"TTFT p{share * 100:.0f}, ms", name in FITTED, len(real),
                    percentile([each.ttft_s for each in real], share) * 1e3,
                    percentile(model, share) * 1e3,
                )
                for share in (0.5, 0.9)
            ]  # fmt: skip
        rate = sum(results.requests_per_s for results in played) / NUM_SEEDS
        rows.append(
            Comparison(
                name, "all", "requests/s", name in FITTED, len(measured),
                _rate(measured, run), rate,
            )
        )  # fmt: skip
    return rows


def _rate(rows: list[Measured], run: RealRun) -> float:
    """Answers that ended within the workload's time, of all rounds of it."""
    return sum(each.ended_s <= run.seconds_each for each in rows) / (run.seconds_each * run.num_rounds)


def table(rows: list[Comparison]) -> str:
    """A line for each kind of request in each workload: measured → predicted, and the error."""
    columns = ["TTFT p50, ms", "TTFT p90, ms", "requests/s"]
    lines = [
        "| workload | requests | n | " + " | ".join(columns) + " |",
        "|" + "---|" * (3 + len(columns)),
    ]
    by_figure = {(row.workload, row.kind, row.figure): row for row in rows}
    for workload, kind in dict.fromkeys((row.workload, row.kind) for row in rows if row.kind != "all"):
        found = [
            by_figure[workload, kind, columns[0]],
            by_figure[workload, kind, columns[1]],
            by_figure[workload, "all", columns[2]],
        ]
        cells = " | ".join(f"{row.measured:.1f} → {row.predicted:.1f} ({row.error:+.0%})" for row in found)
        mark = " *(fitted)*" if found[0].is_fitted else ""
        lines.append(f"| {workload}{mark} | {kind} | {found[0].num_measured} | {cells} |")
    return "\n".join(lines)
