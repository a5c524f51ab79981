"""Prompts are computed in chunks while others decode, in front of vLLM's own schedulers.

EngineCore's own loop runs them, one step at a time and with two in flight; store, bus and worker are played.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import STEP_TOKENS, ParkingEngine
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, RIGHT
from triptych_vllm_connector.scheduler import prefill_budget
from triptych_vllm_connector.scheduler.prefill_budget import PrefillBudget
from triptych_vllm_connector.scheduler.prefill_chunking import PrefillChunking
from triptych_vllm_connector.seams import vllm_0_33

T = TypeVar("T")
A, B = mm_hash("a"), mm_hash("b")
CHUNK = 4
LATE_CHUNK = 9  # less than a small rest below the prompt of `image_of_another_flow`
PROMPT = 3 * STEP_TOKENS


class FixedChunks(PrefillChunking):
    def __init__(self) -> None:
        super().__init__(0.5)
        self.noted: list[tuple[int, int, float]] = []

    def max_prompt_tokens(self, num_decoding: int, *, is_late: bool = False) -> int:
        return CHUNK

    def max_turn_tokens(self, *, is_late: bool = False) -> int:
        return LATE_CHUNK if is_late else CHUNK

    def note_step(
        self, num_prompt_tokens: int, num_decoding: int, seconds: float, *, is_late: bool = False
    ) -> None:
        self.noted.append((num_prompt_tokens, num_decoding, seconds))


@pytest.fixture
def chunks() -> FixedChunks:
    return FixedChunks()


@pytest.fixture
def engine(make: Callable[..., ParkingEngine], chunks: FixedChunks) -> ParkingEngine:
    return cutting(make(), chunks)


def cutting(engine: ParkingEngine, chunks: FixedChunks) -> ParkingEngine:
    """It takes prompts in these chunks."""
    scheduler = engine.scheduler
    scheduler._prefill_budget = PrefillBudget(
        scheduler, scheduler._stalled, chunks, scheduler._is_ready, lambda: engine.clock.now_s
    )
    return engine


@pytest.fixture
def steps(engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Tokens by request, of each step."""
    return noted_steps(engine, monkeypatch)


def noted(engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch, what: Callable[[Any], T]) -> list[T]:
    """Of each step that this engine's worker gets from now on."""
    found: list[T] = []
    execute = engine.worker.execute_model

    def noting(output: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(what(output))
        return execute(output, *args, **kwargs)

    monkeypatch.setattr(engine.worker, "execute_model", noting)
    return found


def noted_steps(engine: ParkingEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Tokens by request."""
    return noted(engine, monkeypatch, lambda output: dict(output.num_scheduled_tokens))


def decode(engine: ParkingEngine, *request_ids: str) -> None:
    """These decode, until they are aborted."""
    for request_id in request_ids:
        engine.add(request_id, max_tokens=400)
    engine.until(lambda: all(engine.tokens[each] for each in request_ids))


def test_an_engine_that_decodes_nothing_takes_prompts_as_vllm_does(
    engine: ParkingEngine, steps: list[dict[str, int]]
) -> None:
    engine.add("prompt", text=PROMPT)
    engine.run()
    assert [each["prompt"] for each in steps[:3]] == [STEP_TOKENS] * 3


def test_each_step_of_a_prompt_is_a_chunk_while_others_decode(
    engine: ParkingEngine, steps: list[dict[str, int]]
) -> None:
    decode(engine, "text1", "text2")
    steps.clear()
    engine.add("prompt", text=PROMPT, max_tokens=1)
    engine.until(lambda: bool(engine.tokens["prompt"]))
    prompt_steps = [each for each in steps if "prompt" in each]
    assert [each["prompt"] for each in prompt_steps] == [CHUNK] * (PROMPT // CHUNK)
    assert all(each["text1"] == each["text2"] == 1 for each in prompt_steps), "each stream goes on"
    for request_id in ("text1", "text2"):
        engine.abort(request_id)


def test_prompts_share_the_chunk_in_the_order_of_their_arrival(
    engine: ParkingEngine, steps: list[dict[str, int]]
) -> None:
    decode(engine, "text")
    steps.clear()
    engine.add("first", text=2 * CHUNK + 1, max_tokens=400, token=8)
    engine.add("second", text=2 * CHUNK, max_tokens=1, token=9)
    engine.until(lambda: bool(engine.tokens["second"]))
    assert [(each.get("first", 0), each.get("second", 0)) for each in steps if len(each) > 1][:5] == [
        (CHUNK, 0),
        (CHUNK, 0),
        (1, CHUNK - 1),
        (1, CHUNK),
        (1, 1),
    ]
    for request_id in ("text", "first"):
        engine.abort(request_id)


def flood(engine: ParkingEngine) -> None:
    """A flow has a prompt that is computed in part, and one that waits, while another request decodes."""
    decode(engine, "text")
    for number in range(2):
        engine.add(f"flood{number}", text=PROMPT, max_tokens=1, token=8 + number, flow="f")
    engine.turn()


def test_a_prompt_of_another_flow_goes_before_what_of_a_flood_waits(
    engine: ParkingEngine, steps: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", 2)  # one prompt at a time
    flood(engine)
    engine.add("one", text=2 * CHUNK, max_tokens=1, token=7, flow="1")
    steps.clear()
    engine.until(lambda: bool(engine.tokens["flood1"]))
    order = [name for each in steps for name in each if name != "text"]
    assert list(dict.fromkeys(order)) == ["flood0", "one", "flood1"]
    engine.abort("text")


def image_of_another_flow(engine: ParkingEngine) -> None:
    """It waits for its image, and came before the prompt of a flood that is computed in part by now."""
    engine.add("flood0", text=STEP_TOKENS + 2, max_tokens=1, token=7, flow="f")
    engine.add("flood1", text=PROMPT, max_tokens=1, token=8, flow="f")
    engine.turn()
    engine.add("one", A, text=2, rows=(2 * CHUNK,), max_tokens=1, token=9, flow="1")
    engine.turn()
    assert ("pin_or_watch", A) in engine.pins.commands, "steps are full, and it was asked about all the same"
    engine.until(lambda: "flood1" in {each.request_id for each in engine.scheduler.running})


@pytest.fixture
def whole(make: Callable[..., ParkingEngine], chunks: FixedChunks) -> ParkingEngine:
    """Nobody begins without all items."""
    return cutting(make(overlap_min_tokens=1000), chunks)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_prompt_that_is_begun_makes_way_for_one_whose_turn_came_before(
    whole: ParkingEngine, monkeypatch: pytest.MonkeyPatch, decodes: bool
) -> None:
    if decodes:
        decode(whole, "text")
    steps = noted_steps(whole, monkeypatch)
    image_of_another_flow(whole)
    steps.clear()
    whole.comes(A)
    whole.until(lambda: bool(whole.tokens["flood1"]))
    order = [name for each in steps for name in each if name != "text"]
    runs = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert runs[-2:] == ["one", "flood1"]
    assert order.count("flood1") > 1, "it was begun, and not done"
    num_decoding = decodes + 1  # with two steps in flight flood0 counts in the first
    with_it = [each for each in steps if "one" in each]
    if decodes:
        assert all(sum(each.values()) <= CHUNK + num_decoding for each in with_it)
        assert all(each["text"] == 1 for each in steps), "the stream goes on"
        whole.abort("text")
    else:
        # Three chunks long. With two steps in flight flood0 decodes beside the first one.
        assert len(with_it) <= 2, "who comes now comes after it, and no small rest is left"
        assert max(each["one"] for each in with_it) > CHUNK


@pytest.mark.parametrize("others", [(), ("text",)])
def test_decoding_of_a_flood_alone_does_not_bound_the_steps_of_a_late_prompt(
    whole: ParkingEngine, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    decode(whole, *others)
    steps = noted_steps(whole, monkeypatch)
    are_late = noted(whole, monkeypatch, lambda output: output.ec_connector_metadata.is_late)
    whole.add("streams", text=2, max_tokens=400, token=6, flow="f")
    whole.until(lambda: bool(whole.tokens["streams"]))
    image_of_another_flow(whole)
    whole.add("flood2", text=PROMPT, max_tokens=1, token=5, flow="f")
    steps.clear()
    are_late.clear()
    whole.comes(A)
    whole.until(lambda: bool(whole.tokens["one"]))
    with_it = [each for each in steps if "one" in each]
    if others:
        assert len(with_it) > 1, with_it
    else:
        assert len(with_it) == 1
    assert are_late == ["one" in each for each in steps], "the worker is told"
    assert all(each["streams"] == 1 for each in steps), "it goes on all the same"
    for request_id in ("streams", "flood1", "flood2", *others):
        whole.abort(request_id)


def test_where_there_is_no_room_for_it_what_is_begun_goes_on(
    make: Callable[..., ParkingEngine], chunks: FixedChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cutting(make(overlap_min_tokens=1000, num_blocks=PROMPT // BLOCK_SIZE + 1), chunks)
    steps = noted_steps(engine, monkeypatch)
    image_of_another_flow(engine)
    engine.until(lambda: sum(each.get("flood1", 0) for each in steps) > PROMPT - 2 * CHUNK)
    steps.clear()
    engine.comes(A)
    engine.until(lambda: bool(engine.tokens["flood1"]))
    assert len([each for each in steps if not each]) <= 2, "one step that computes nothing, or two in flight"
    assert all(each.get("flood1", 0) <= CHUNK for each in steps), "nothing is late that could not begin"
    engine.until(lambda: bool(engine.tokens["one"]))


@pytest.mark.parametrize("params", ["x", 5, {"flow": 7}])
def test_parameters_that_are_none_end_no_engine(engine: ParkingEngine, params: Any) -> None:
    """Of a text request: vLLM passes on what a caller has put there."""
    request = engine.add("text", max_tokens=1)
    engine.abort("text")
    engine.check_idle()
    request.ec_transfer_params = params
    engine.scheduler._prefill_budget.add_request(request)
    assert not engine.scheduler._prefill_budget._turns.are_several
    engine.scheduler._prefill_budget.remove_request(request.request_id)


def test_a_prompt_with_images_is_cut_in_their_midst(
    engine: ParkingEngine, steps: list[dict[str, int]]
) -> None:
    decode(engine, "text")
    engine.add("images", A, B, text=3, rows=(6, 6), max_tokens=1)
    engine.turn()  # the text in front of the first image; the store is asked
    for item in (A, B):
        engine.comes(item)
    steps.clear()
    engine.until(lambda: bool(engine.tokens["images"]))
    assert [each["images"] for each in steps if "images" in each] == [4, 4, 4, 4, 2]
    assert engine.tokens["images"] == [RIGHT]
    engine.abort("text")


def test_a_stalled_request_costs_nobody_a_chunk(engine: ParkingEngine, steps: list[dict[str, int]]) -> None:
    engine.add("stalled", A, text=2, rows=(6,), max_tokens=1)
    engine.run()
    decode(engine, "text")
    steps.clear()
    engine.add("prompt", text=PROMPT, max_tokens=1, token=9)
    engine.until(lambda: bool(engine.tokens["prompt"]))
    assert not any("stalled" in each for each in steps)
    assert {each["prompt"] for each in steps if "prompt" in each} == {CHUNK}
    engine.comes(A)
    engine.until(lambda: bool(engine.tokens["stalled"]))
    engine.abort("text")


def step(**tokens: int) -> SimpleNamespace:
    """vLLM's `SchedulerOutput`, as far as it is read here."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_encoder_inputs={},
        scheduled_new_reqs=[],
    )


def test_a_step_counts_from_when_it_was_scheduled_or_the_one_before_was_done(
    engine: ParkingEngine, chunks: FixedChunks
) -> None:
    decode(engine, "text")
    engine.abort("text")
    engine.check_idle()
    chunks.noted.clear()
    steps = engine.scheduler._prefill_budget
    first, second, third = step(prompt=8), step(prompt=4), step(prompt=2)
    for at, event, output in (
        (10.0, steps.on_step_scheduled, first),
        (11.0, steps.on_step_scheduled, second),  # while the first one runs
        (13.0, steps.on_step_output, first),
        (18.0, steps.on_step_output, second),
        (20.0, steps.on_step_scheduled, third),
        (21.0, steps.on_step_output, third),
    ):
        engine.clock.now_s = at
        event(output)
    assert chunks.noted == [(8, 0, 3.0), (4, 0, 5.0), (2, 0, 1.0)]


def test_tokens_of_prompts_are_told_from_those_that_are_decoded(
    engine: ParkingEngine, chunks: FixedChunks
) -> None:
    decode(engine, "text1", "text2")
    engine.add("prompt", text=PROMPT, max_tokens=1, token=9)
    chunks.noted.clear()
    engine.until(lambda: bool(engine.tokens["prompt"]))
    noted = [each[:2] for each in chunks.noted]
    assert noted.count((CHUNK, 2)) == PROMPT // CHUNK
    assert set(noted) <= {(CHUNK, 2), (0, 2)}
    for request_id in ("text1", "text2"):
        engine.abort(request_id)


@pytest.mark.parametrize(
    "option", ["disable_chunked_mm_input", "long_prefill_token_threshold", "prefill_schedule_interval"]
)
def test_what_vllm_may_not_cut_is_not_cut(
    make: Callable[..., ParkingEngine], chunks: FixedChunks, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    engine = make()
    scheduler = engine.scheduler
    if option == "prefill_schedule_interval":  # without data parallelism since vLLM 0.33
        monkeypatch.setattr(scheduler, "local_prefill_interval", STEP_TOKENS, raising=False)
        monkeypatch.setattr(prefill_budget, "seam", vllm_0_33)
    else:
        monkeypatch.setattr(scheduler.scheduler_config, option, STEP_TOKENS)
    scheduler._prefill_budget = PrefillBudget(scheduler, scheduler._stalled, chunks, scheduler._is_ready)
    decode(engine, "text")
    engine.add("prompt", text=PROMPT, max_tokens=1, token=9)
    engine.turn()
    assert scheduler.max_num_scheduled_tokens == STEP_TOKENS
    engine.abort("text")
