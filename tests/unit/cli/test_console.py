"""How sizes are printed."""

from pathlib import Path

import pytest

from triptych_cli.console import format_bytes, remedy_of, show_tail

VLLM_SAYS = (
    "ValueError: To serve at least one request with the model's max seq len (128000), (4.39 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, "
    "the estimated maximum model length is 29120. Try increasing `gpu_memory_utilization` (which also "
    "controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine."
)


def test_bytes_are_shown_with_binary_units() -> None:
    assert [format_bytes(n) for n in (12, 1536, 3 << 20, 5 << 30)] == [
        "12 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


def test_a_kv_cache_that_is_too_small_is_told_with_vllms_figures_and_both_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefill_decode-0.log"
    file.write_text(f"{VLLM_SAYS}\nlast line\n")
    show_tail(file)
    shown = capsys.readouterr().err
    for part in ("128000 tokens needs 4.39 GiB", "1.0 GiB are there, enough for 29120 tokens",
                 '--prefill-decode-args "--max-model-len 29120"', "VLLM_CPU_KVCACHE_SPACE=5"):  # fmt: skip
        assert part in shown


def test_without_vllms_estimate_the_remedy_has_no_figure_for_it() -> None:
    remedy = remedy_of(VLLM_SAYS.replace("the estimated maximum model", "xx"))
    assert remedy is not None
    assert "--max-model-len TOKENS" in remedy


def test_other_failures_have_no_such_remedy() -> None:
    assert remedy_of("ValueError: something else") is None
