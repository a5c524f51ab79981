"""The comparison's pure parts: rounds, turns, stages, bars, exactness, tables. No engine, no times."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from comparison.arms import ARMS, Arm
from comparison.bars import Outcome, Verdict, verdicts
from comparison.exactness import compare_tokens
from comparison.measuring import Measured, turns
from comparison.model_shapes import SCALES, Scale
from comparison.report import bars_table
from comparison.stages import stage_times
from comparison.workloads import WORKLOADS, Round, make_round
from load.contents import TextMaker

from triptych_encoder.settings import EncoderSettings
from triptych_gateway.settings import GatewaySettings
from triptych_prefill_decode.settings import PrefillDecodeSettings

MODEL = Path(__file__).resolve().parents[3] / "models" / "digits-vl"
SMALL = Scale("tiny", SCALES["s"].text, SCALES["s"].tower, 56, 1.0, 1.0)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_the_services_take_what_an_arm_sets(
    arm: Arm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, value in {"TRIPTYCH_MODEL": "m", "TRIPTYCH_RUN_DIR": str(tmp_path), **arm.env}.items():
        monkeypatch.setenv(variable, value)
    read: set[str] = set()
    for settings in (GatewaySettings, EncoderSettings, PrefillDecodeSettings):
        settings()
        read |= {f"TRIPTYCH_{name.upper()}" for name in settings.model_fields}
    assert arm.env.keys() <= read, "a variable that no service reads changes nothing"


@pytest.mark.parametrize(
    ("name", "decision"), [("helping", "auto"), ("always_remote", "remote"), ("always_local", "local")]
)
def test_arms_that_differ_in_who_encodes_differ_in_nothing_else(
    name: str, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = ARMS[name]
    for variable, value in {"TRIPTYCH_MODEL": "m", **arm.env}.items():
        monkeypatch.setenv(variable, value)
    assert GatewaySettings().encode_decision == decision
    assert PrefillDecodeSettings().local_encode == "fallback"
    env = {**arm.env, "TRIPTYCH_ENCODE_DECISION": "auto"}
    assert replace(arm, env=env, name="helping", summary="") == replace(ARMS["helping"], summary="")


@pytest.fixture(scope="module")
def texts() -> TextMaker:
    return TextMaker(MODEL)


def asked(made: Round) -> list[object]:
    """Everything of a round that goes to a server."""
    questions = [*made.one_by_one, *(question for _, question in made.arrivals)]
    questions += [question for client in made.clients for question in islice(client.questions, 3)]
    return [question.body("model") for question in questions]


# ---- workloads -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_arm_gets_the_same_bytes_and_every_repeat_others(name: str, texts: TextMaker) -> None:
    one, again, other = (
        asked(make_round(WORKLOADS[name], SMALL, texts, 10.0, 1, repeat)) for repeat in (0, 0, 1)
    )
    assert one == again
    assert one != other
    assert one


@pytest.mark.parametrize(
    ("name", "num_images"),
    [("one_image", 1), ("two_images", 2), ("four_images", 4), ("eight_images", 8), ("sixteen_images", 16)],
)
def test_images_of_a_round_are_all_different(name: str, num_images: int, texts: TextMaker) -> None:
    made = make_round(WORKLOADS[name], SMALL, texts, 10.0, 1, 0)
    urls = [
        part["image_url"]["url"]
        for question in made.one_by_one
        for part in question.messages[0]["content"]
        if part["type"] == "image_url"
    ]
    assert len(urls) == num_images * len(made.one_by_one)
    assert len(set(urls)) == len(urls)


def test_a_known_image_is_sent_untimed_first(texts: TextMaker) -> None:
    new, known = make_round(WORKLOADS["known_image"], SMALL, texts, 10.0, 1, 0).one_by_one[:2]
    assert (new.is_timed, known.is_timed) == (False, True)
    assert new.messages[0]["content"][0] == known.messages[0]["content"][0]
    assert new.messages[0]["content"][1] != known.messages[0]["content"][1]


# ---- order ---------------------------------------------------------------------------------------
def test_every_arm_is_first_as_often_as_any_other() -> None:
    arms = ["a", "b", "c"]
    orders = [turns(arms, number) for number in range(6)]
    assert all(sorted(order) == arms for order in orders)
    assert sorted(order[0] for order in orders[:3]) == arms
    assert {tuple(order) for order in orders} >= {("a", "b", "c"), ("c", "b", "a")}


# ---- stages and bars -----------------------------------------------------------------------------
def measured_with(ttfts: dict[tuple[str, str], float], encode: dict[str, float] | None = None) -> Measured:
    """Three equal repeats: TTFT by workload and arm; the serial arm's encode by workload."""
    measured = Measured()
    for (workload, arm), ttft in ttfts.items():
        found = {"image.ttft_ms": ttft}
        if arm == "serial" and encode is not None:
            found |= {"image.encode_ms": encode[workload], "image.after_encode_ms": ttft - encode[workload]}
        measured.figures.setdefault(workload, {})[arm] = [found] * 3
    return measured


BALANCED = measured_with(
    {
        ("one_image", "serial"): 310.0, ("eight_images", "serial"): 2410.0, ("four_images", "serial"): 1210.0,
        ("text_then_image", "serial"): 900.0, ("four_images", "triptych"): 850.0,
        ("one_image", "triptych"): 310.0, ("eight_images", "triptych"): 1500.0,
        ("text_then_image", "triptych"): 760.0,
    },
    {"one_image": 160.0, "eight_images": 1210.0, "four_images": 610.0, "text_then_image": 160.0},
)  # fmt: skip


def test_stage_times_are_what_each_further_image_adds() -> None:
    times = stage_times(BALANCED)
    assert (times.encode_one, times.encode_each, times.prefill_each) == (160.0, 150.0, 150.0)
    assert times.prefill_text == 590.0


def test_a_bar_is_held_missed_by_some_or_not_measured() -> None:
    found = {verdict.bar.title: verdict for verdict in verdicts(BALANCED, "m")}
    four = found["four_images: image.ttft_ms, triptych ÷ serial"]  # the later of two bars: never above 1
    assert four.outcome is Outcome.HELD
    one = next(each for each in verdicts(BALANCED, "m") if each.bar.workload == "one_image")
    assert one.outcome is Outcome.MISSED
    assert one.missed_by == pytest.approx(0.03)
    assert found["mixed: text.stall_ms, text_first ÷ monolith"].outcome is Outcome.NOT_MEASURED


def who_encodes(**ttfts: float) -> Verdict:
    """Of four images, by arm."""
    measured = measured_with({("four_images", arm): ttft for arm, ttft in ttfts.items()})
    found = [each for each in verdicts(measured, "m") if each.bar.arm == "helping"]
    return next(each for each in found if each.bar.workload == "four_images")


@pytest.mark.parametrize(
    ("remote", "local", "outcome", "base"),
    [
        (100.0, 200.0, Outcome.MISSED, "always_remote"),
        (200.0, 100.0, Outcome.MISSED, "always_local"),
        (108.0, 300.0, Outcome.HELD, "always_remote"),
        (300.0, 300.0, Outcome.HELD, "always_remote"),
    ],
)
def test_of_several_bases_the_better_one_counts(
    remote: float, local: float, outcome: Outcome, base: str
) -> None:
    found = who_encodes(helping=110.0, always_remote=remote, always_local=local)
    assert (found.outcome, found.base) == (outcome, base)
    assert found.got.middle == pytest.approx(110.0 / min(remote, local))
    assert found.as_json()["base"] == base
    assert f"÷ {base}" in bars_table([found])


# ---- arms, models, exactness, tables -------------------------------------------------------------


def test_other_tokens_are_found_with_their_place() -> None:
    tokens = {"monolith": {"a/0": [1, 2], "a/1": [3]}, "serial": {"a/0": [1, 9], "a/1": [3]}, "other": {}}
    found = compare_tokens(tokens, "monolith")
    assert (found["serial"].num_compared, found["serial"].num_equal) == (2, 1)
    assert found["serial"].differing == ["a/0 from token 1"]
    assert found["other"].num_compared == 0
