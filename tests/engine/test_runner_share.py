"""What the runner wrappers report of a step to the worker's compute share. No engine is started."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.cores.sharing import Work

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.step_metadata import StepOrders
    from triptych_vllm_connector.worker import runner_wrappers
    from triptych_vllm_connector.worker.runner_wrappers import PREFILL_TOKENS, wrap

MODEL = object()


class Share:
    """Notes what it is told."""

    range = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.late: list[bool] = []

    def watch_layers(self, model: object) -> None:
        self.calls.append(("watch_layers", model))

    def start_step(self, work: Work, *, is_late: bool = False) -> None:
        self.calls.append(work)
        self.late.append(is_late)

    def end_step(self) -> None:
        self.calls.append("end")


class StepError(RuntimeError):
    """The step failed."""


class Runner:
    """A runner of vLLM's first generation: its entry and its model alone; it never encodes."""

    model = MODEL

    def load_model(self) -> None:
        pass

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[Any]:
        raise NotImplementedError

    def execute_model(self, scheduler_output: Any) -> str:
        if scheduler_output.fails:
            raise StepError
        return "output"


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Share:
    share = Share()
    config = SimpleNamespace(has_encoder=False, debug_encode_delay_s=0.0)
    connector = SimpleNamespace(share=share, writer=None, config=config)
    monkeypatch.setattr(runner_wrappers, "connector_of_worker", lambda: connector)
    return share


def step(
    *num_tokens: int, decodes: bool = False, encodes: bool = False, fails: bool = False, orders: Any = None
) -> Any:
    return SimpleNamespace(
        ec_connector_metadata=orders,
        scheduled_cached_reqs=SimpleNamespace(num_output_tokens=[0, 3] if decodes else [0]),
        scheduled_encoder_inputs={"r": [0]} if encodes else {},
        num_scheduled_tokens={str(number): each for number, each in enumerate(num_tokens)},
        total_num_scheduled_tokens=sum(num_tokens),
        fails=fails,
    )


def test_encoder_reports_encodes_and_has_the_share_watch_its_layers(share: Share) -> None:
    runner = wrap(Runner(), is_producer=True)
    runner.load_model()
    assert runner.execute_model(step(encodes=True)) == "output"
    runner.execute_model(step())  # nothing is encoded
    with pytest.raises(StepError):
        runner.execute_model(step(encodes=True, fails=True))
    assert share.calls == [("watch_layers", MODEL), Work.ENCODE, "end", Work.ENCODE, "end"]


def test_prefill_decode_tells_text_from_prompts(share: Share) -> None:
    runner = wrap(Runner(), is_producer=False)
    for each in (
        step(1, 1, decodes=True),
        step(1, PREFILL_TOKENS, decodes=True),
        step(1, PREFILL_TOKENS - 1, decodes=True),  # a few tokens of a prompt are not worth more threads
        step(PREFILL_TOKENS - 1),
        step(),
    ):
        runner.execute_model(each)
    with pytest.raises(StepError):
        runner.execute_model(step(1, decodes=True, fails=True))
    works = [each for each in share.calls if each != "end"]
    assert works == [Work.DECODE, Work.CHUNK, Work.DECODE, Work.PREFILL, Work.DECODE]
    assert share.calls.count("end") == len(works)


def test_a_step_with_a_late_prompt_says_so(share: Share) -> None:
    runner = wrap(Runner(), is_producer=False)
    for orders in (StepOrders(is_late=True), StepOrders(), None):
        runner.execute_model(step(PREFILL_TOKENS, orders=orders))
    assert share.late == [True, False, False]
