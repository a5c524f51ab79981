"""vLLM's options are found however they are spelled."""

import pytest

from triptych_common.domain.engine_args import option_value


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--max-model-len=8"], "8"),
        (["--max-model-len", "8"], "8"),
        (["--max_model_len=8"], "8"),
        (["--max_model_len", "8"], "8"),
        (["--max-model-len=8", "--max_model_len", "9"], "9"),
        (["--max-model-len", "9", "--max-model-len=8"], "8"),
        (["--max-model-length=8"], None),
        (["--max-model-len"], None),
        (["--max-model-len=a_b=c"], "a_b=c"),
    ],
)
def test_the_last_value_counts_in_any_spelling(arguments: list[str], value: str | None) -> None:
    assert option_value(arguments, "--max-model-len") == value


@pytest.mark.parametrize("arguments", [["-tp", "2"], ["-tp=2"], ["--tensor_parallel_size", "2"]])
def test_an_option_may_have_several_names(arguments: list[str]) -> None:
    assert option_value(arguments, "--tensor-parallel-size", "-tp") == "2"


def test_a_value_is_no_option() -> None:
    assert option_value(["--seed", "2", "--dtype=-tp"], "--tensor-parallel-size", "-tp") is None
