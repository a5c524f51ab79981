"""Behaviour of large deployments, by the model: the tables of docs/operations/scaling.md.

Load is open (Poisson). *Capacity* is the highest rate at which the objectives hold: TTFT p90 and the mean gap
between tokens p90, of the requests that arrive in 20 s. Over so short a time a queue that grows slowly is
within them, so it is a few percent above what can be borne for ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulation.parameters import Deployment, StageTimes
from simulation.results import Results
from simulation.system import simulate
from simulation.workload import Arrivals, RequestKind, Stream, Workload

WARM_S, RUN_S = 5.0, 25.0
TTFT_GOAL_MS, GAP_GOAL_MS = 1500.0, 50.0
MIXED = (2, 6), (2, 6), (2, 6), (1, 7), (1, 7)  # 8 encoders, 32 prefill_decodes, 8 GPUs a host
IMAGE_SIDE = 1092  # pixels: 1,521 rows


@dataclass(frozen=True)
class Case:
    """One system under one mix of requests."""

    title: str
    times: StageTimes
    deployment: Deployment
    mix: tuple[tuple[RequestKind, float], ...]  # kinds, with their shares


@dataclass(frozen=True)
class Found:
    """The capacity of a case, and the run at that rate."""

    case: Case
    rate: float
    results: Results

    @property
    def num_gpus(self) -> int:
        return self.case.deployment.num_encoders + self.case.deployment.num_prefill_decodes


def chat(num_images: int, *, words: int = 200, tokens: int = 200, known: float = 0.0) -> RequestKind:
    return RequestKind(
        f"{num_images} images", num_images, IMAGE_SIDE, words, tokens, known_share=known
    )  # fmt: skip


def triptych(hosts: Sequence[tuple[int, int]] = MIXED, **changes: object) -> Deployment:
    base = Deployment("Triptych", tuple(hosts), gateways_per_host=4, num_ahead=4, overlap=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def monolith(num_hosts: int = 5, per_host: int = 8) -> Deployment:
    return Deployment(
        "monolith", ((0, per_host),) * num_hosts, gateways_per_host=4, is_monolith=True
    )  # fmt: skip


def run_at(case: Case, rate: float, *, seed: int = 0, seconds: float = RUN_S) -> Results:
    streams = [Stream(kind, Arrivals.POISSON, rate=rate * share) for kind, share in case.mix if share]
    return simulate(case.times, case.deployment, Workload(streams, seconds), seed=seed, warm_s=WARM_S)


def holds(results: Results) -> bool:
    """The objectives, at a rate that is kept up with. Answers of one token have no gap."""
    has_gaps = any(results.gap_s.values())
    if has_gaps and results.gap_ms(0.9) > GAP_GOAL_MS:
        return False
    return results.keeps_up and results.ttft_ms(0.9) <= TTFT_GOAL_MS


def capacity(case: Case, *, tolerance: float = 0.05, start: float = 20.0) -> Found:
    """Highest rate within the objectives, by doubling and halving; deterministic."""
    low, low_results, high = 0.0, run_at(case, 1.0), start
    while holds(results := run_at(case, high)):
        low, low_results, high = high, results, high * 2
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if holds(results := run_at(case, middle)):
            low, low_results = middle, results
        else:
            high = middle
        if high < 0.1:
            break
    return Found(case, low, low_results)


def scaled(times: StageTimes, part: str, factor: float) -> StageTimes:
    """`times` with all costs of one part multiplied; `encode` and `prefill` are single costs."""
    match part:
        case "encode":
            encoder = replace(
                times.encoder, step_s=times.encoder.step_s * factor, row_s=times.encoder.row_s * factor
            )
            return replace(times, encoder=encoder)
        case "preprocess":
            encoder = replace(
                times.encoder, preprocess_s=times.encoder.preprocess_s * factor,
                preprocess_row_s=times.encoder.preprocess_row_s * factor,
            )  # fmt: skip
            return replace(times, encoder=encoder)
        case "prefill":
            return replace(times, engine=replace(times.engine, token_s=times.engine.token_s * factor))
        case "decode":
            engine = replace(
                times.engine, step_s=times.engine.step_s * factor, context_s=times.engine.context_s * factor
            )
            return replace(times, engine=engine)
        case "redis":
            return replace(times, redis=replace(times.redis, command_s=times.redis.command_s * factor))
        case "gateway":
            costs = times.gateway
            gateway = replace(
                costs, request_s=costs.request_s * factor, request_rest_s=costs.request_rest_s * factor,
                item_s=costs.item_s * factor, item_rest_s=costs.item_rest_s * factor,
                chunk_s=costs.chunk_s * factor,
            )  # fmt: skip
            return replace(times, gateway=gateway)
        case _:
            raise ValueError(f"no part {part!r}")


PARTS = ("encode", "preprocess", "prefill", "decode", "redis", "gateway")


def header(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def rates_table(case: Case, rates: Sequence[float]) -> tuple[list[str], list[tuple[float, Results]]]:
    """TTFT, gaps and how busy each part is, over the rate."""
    runs = [(rate, run_at(case, rate)) for rate in rates]
    lines = header(
        "requests/s", "TTFT p50 / p90, ms", "gap p90, ms", "answers/s", "encoders, mean", "busiest encoder",
        "engines", "preprocessing", "Redis", "gateway", "store",
    )  # fmt: skip
    for rate, results in runs:
        shares = results.shares
        busy = (
            shares.encoder, shares.hottest_encoder, shares.engine, shares.preprocess, shares.redis,
            shares.gateway, shares.store,
        )  # fmt: skip
        lines.append(
            f"| {rate:.0f} | {results.ttft_ms(0.5):.0f} / {results.ttft_ms(0.9):.0f} "
            f"| {results.gap_ms(0.9):.1f} | {results.requests_per_s:.0f} | "
            + " | ".join(f"{share:.0%}" for share in busy)
            + " |"
        )
    return lines, runs


def capacity_table(founds: Sequence[Found]) -> list[str]:
    lines = header(
        "system", "GPUs", "requests/s within the objectives", "TTFT p50 / p90, ms", "gap p90, ms",
        "busiest part", "encoders / engines busy",
    )  # fmt: skip
    for found in founds:
        results = found.results
        part, share = results.shares.first()
        lines.append(
            f"| {found.case.title} | {found.num_gpus} | {found.rate:.0f} "
            f"| {results.ttft_ms(0.5):.0f} / {results.ttft_ms(0.9):.0f} | {results.gap_ms(0.9):.1f} "
            f"| {part} {share:.0%} | {results.shares.encoder:.0%} / {results.shares.engine:.0%} |"
        )
    return lines


def ratio_cases(times: StageTimes, num_images: Sequence[int]) -> list[Case]:
    """Cases of one host of eight GPUs: every split, and the monolith, for each number of images."""
    cases = []
    for number in num_images:
        mix = ((chat(number), 1.0),)
        cases.append(Case(f"monolith, {number} images", times, monolith(1), mix))
        for encoders in range(1, 7):
            title = f"{encoders} E + {8 - encoders} PD, {number} images"
            cases.append(Case(title, times, triptych([(encoders, 8 - encoders)]), mix))
    return cases


def best_split(founds: Sequence[Found], key: Callable[[Found], float] = lambda found: found.rate) -> Found:
    return max(founds, key=key)
