"""The studies by name: what each asks of the model, as lines of Markdown, some with a drawing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulation.charts import Line, line_chart
from simulation.parameters import StageTimes
from simulation.scale_out import scale_out
from simulation.studies import (
    PARTS,
    Case,
    Found,
    best_split,
    capacity,
    capacity_table,
    chat,
    header,
    monolith,
    rates_table,
    ratio_cases,
    run_at,
    scaled,
    triptych,
)
from simulation.workload import RequestKind

RATES = (20, 60, 120, 180, 240, 300, 360)
LINK = 25e9  # bytes/s between hosts: a network card of 200 Gbit/s
BALANCED, MORE_ENCODERS = [(2, 6)] * 5, [(3, 5)] * 5
ONE_IMAGE = ((chat(1), 1.0),)
Lines = Callable[[StageTimes, Path | None], list[str]]


@dataclass(frozen=True)
class Study:
    """`lines(times, folder for drawings)`."""

    title: str
    lines: Lines


def _rates(times: StageTimes, charts: Path | None) -> list[str]:
    cases = {
        "8 E + 32 PD": Case("8 E + 32 PD", times, triptych(), ONE_IMAGE),
        "15 E + 25 PD": Case("15 E + 25 PD", times, triptych(MORE_ENCODERS), ONE_IMAGE),
        "monolith ×40": Case("monolith ×40", times, monolith(), ONE_IMAGE),
    }
    lines: list[str] = []
    drawn: list[Line] = []
    for title, case in cases.items():
        table, runs = rates_table(case, RATES)
        lines += [f"**{title}**, five hosts of 8 GPUs, each a deployment of its own", "", *table, ""]
        drawn.append((title, [(rate, results.ttft_ms(0.9)) for rate, results in runs]))
    if charts is not None:
        name = charts / "scaling-ttft.svg"
        title = "First token about one image, p90, 40 GPUs (model)"
        name.write_text(line_chart(title, "requests per second", "ms", drawn, y_max=2000.0))
    return lines


def _layouts(times: StageTimes, _charts: Path | None) -> list[str]:
    whole = triptych(is_whole=True, link_bytes_per_s=LINK)
    cases = [
        Case("8 E + 32 PD, a deployment each host (3 × 2 + 6, 2 × 1 + 7)", times, triptych(), ONE_IMAGE),
        Case("10 E + 30 PD, a deployment each host (5 × 2 + 6)", times, triptych(BALANCED), ONE_IMAGE),
        Case("15 E + 25 PD, a deployment each host (5 × 3 + 5)", times, triptych(MORE_ENCODERS), ONE_IMAGE),
        Case("8 E + 32 PD, one deployment, 25 GB/s between hosts", times, whole, ONE_IMAGE),
        Case(
            "8 E + 32 PD, one deployment, tensors through Redis", times,
            replace(whole, link_bytes_per_s=0.0), ONE_IMAGE,
        ),
        Case("monolith, 40 engines", times, monolith(), ONE_IMAGE),
    ]  # fmt: skip
    return capacity_table([capacity(case) for case in cases])


def _ratio(times: StageTimes, _charts: Path | None) -> list[str]:
    splits_there = [f"{e} E + {8 - e} PD" for e in range(1, 7)]
    lines = header(
        "images in a request", *splits_there, "monolith", "monolith, preprocessing ×8 as fast",
        "best ÷ monolith", "best ÷ the faster one", "busiest part of the best",
    )  # fmt: skip
    for number in (1, 4, 8):
        base, *splits = [capacity(case) for case in ratio_cases(times, [number])]
        best = best_split(splits)
        part, share = best.results.shares.first()
        cells = " | ".join(f"**{each.rate:.1f}**" if each is best else f"{each.rate:.1f}" for each in splits)
        quick = capacity(replace(base.case, times=scaled(times, "preprocess", 1 / 8)))
        lines.append(
            f"| {number} | {cells} | {base.rate:.1f} | {quick.rate:.1f} | {_over(best, base)} "
            f"| {_over(best, quick)} | {part} {share:.0%} |"
        )
    return lines


def _over(found: Found, base: Found) -> str:
    return f"{found.rate / base.rate:.2f}" if base.rate else "–"


def _sensitivity(times: StageTimes, _charts: Path | None) -> list[str]:
    deployment, base_case = triptych([(3, 5)]), triptych([(3, 5)])
    base = capacity(Case("base", times, base_case, ONE_IMAGE)).rate
    lines = ["| cost | halved | as it is | doubled |", "|---|---|---|---|"]
    for part in PARTS:
        changed = [
            capacity(Case(part, scaled(times, part, factor), deployment, ONE_IMAGE)).rate
            for factor in (0.5, 2.0)
        ]
        cells = [changed[0], base, *changed[1:]]
        lines.append(f"| {part} | " + " | ".join(f"{rate:.1f}" for rate in cells) + " |")
    return lines


def _switches(times: StageTimes, _charts: Path | None) -> list[str]:
    """Effect of overlap and of the encoder's policy, far from saturation and near it."""
    lines = [
        "| 3 E + 5 PD | images | TTFT p50 / p90 at 2 requests/s, ms | requests/s within the objectives |",
        "|---|---|---|---|",
    ]
    variants = {
        "overlap, sizes ahead of slots": triptych([(3, 5)]),
        "… one image in an encode step": triptych([(3, 5)], batch_items=1),
        "… without overlap": triptych([(3, 5)], overlap=False),
        "… without overlap, without sizes ahead": triptych([(3, 5)], overlap=False, num_ahead=0),
    }
    for number in (1, 4):
        for title, deployment in variants.items():
            case = Case(title, times, deployment, ((chat(number), 1.0),))
            quiet, found = run_at(case, 2.0, seconds=60.0), capacity(case)
            lines.append(
                f"| {title} | {number} | {quiet.ttft_ms(0.5):.0f} / {quiet.ttft_ms(0.9):.0f} "
                f"| {found.rate:.1f} |"
            )
    return lines


def _worth(times: StageTimes, _charts: Path | None) -> list[str]:
    """Mixes of requests on one host: the best split against the monolith."""
    text = RequestKind("text", 0, num_text_words=500, num_output_tokens=300)
    one, four = chat(1), chat(4)
    mixes: dict[str, tuple[tuple[RequestKind, float], ...]] = {
        "text only": ((text, 1.0),),
        "one request in ten has an image": ((text, 0.9), (one, 0.1)),
        "half of the requests have an image": ((text, 0.5), (one, 0.5)),
        "one image each, short answers of 20 tokens": ((chat(1, tokens=20), 1.0),),
        "one image each, long answers of 800 tokens": ((chat(1, tokens=800), 1.0),),
        "one image each, nine in ten known": ((chat(1, known=0.9), 1.0),),
        "four images each": ((four, 1.0),),
    }
    lines = header(
        "requests", "best split", "Triptych, requests/s", "monolith, requests/s", "ratio",
        "at half the monolith's rate: TTFT p90, gap p90, ms", "monolith's",
    )  # fmt: skip
    for title, mix in mixes.items():
        base = capacity(Case(title, times, monolith(1), mix))
        splits = [capacity(Case(f"{e} + {8 - e}", times, triptych([(e, 8 - e)]), mix)) for e in (1, 2, 3)]
        best = best_split(splits)
        half = base.rate / 2
        ours, theirs = run_at(best.case, half), run_at(base.case, half)
        lines.append(
            f"| {title} | {best.case.title} | {best.rate:.1f} | {base.rate:.1f} | {_over(best, base)} "
            f"| {ours.ttft_ms(0.9):.0f}, {ours.gap_ms(0.9):.1f} "
            f"| {theirs.ttft_ms(0.9):.0f}, {theirs.gap_ms(0.9):.1f} |"
        )
    return lines


def _control(times: StageTimes, _charts: Path | None) -> list[str]:
    """Images and streams per second that each part of the control plane can bear, by its costs alone."""
    redis, gateway, store = times.redis, times.gateway, times.store
    item_cpu = gateway.item_s + gateway.item_rest_s
    ceilings: Sequence[tuple[str, str, float]] = (
        ("Redis, one server", "new images/s", 1 / (redis.command_s * redis.item_commands)),
        ("one gateway", "requests/s with a new image", 1 / (_request_s(times) + item_cpu)),
        ("one gateway", "text requests/s of one token", 1 / _request_s(times)),
        ("one gateway", "streamed tokens/s", 1 / gateway.chunk_s),
        ("a host's store", "images/s", 1 / (store.command_s * store.item_commands)),
        ("one encoder's threads", "images of 1,521 rows/s", _preprocess_rate(times, 1521)),
        ("one encoder's GPU", "images of 1,521 rows/s", _encode_rate(times, 1521)),
    )  # fmt: skip
    lines = ["| part | of what | at most |", "|---|---|---|"]
    return lines + [f"| {part} | {what} | {limit:,.0f} |" for part, what, limit in ceilings]


def _request_s(times: StageTimes) -> float:
    return times.gateway.request_s + times.gateway.request_rest_s


def _encode_rate(times: StageTimes, rows: int) -> float:
    return 1 / (times.encoder.step_s + times.encoder.row_s * rows)


def _preprocess_rate(times: StageTimes, rows: int) -> float:
    encoder = times.encoder
    return encoder.num_threads / (encoder.preprocess_s + encoder.preprocess_row_s * rows)


STUDIES: dict[str, Study] = {
    "ceilings": Study("What each part bears alone", _control),
    "rates": Study("One image a request, over the rate", _rates),
    "layouts": Study("40 GPUs, laid out in different ways", _layouts),
    "ratio": Study("One host of 8 GPUs: encoders for how many images", _ratio),
    "switches": Study("Overlap, and the order of encodes", _switches),
    "sensitivity": Study("3 E + 5 PD, one image: a cost at a time changed", _sensitivity),
    "worth": Study("When it pays", _worth),
    "scale-out": Study("Encoders that follow a tenfold burst", scale_out),
}
