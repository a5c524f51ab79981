"""Which fields of vLLM's models an engine without an encoder is given."""

import ast
import functools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from tests.support.vllm_seams.source import SourceUnavailableError, source_of
from triptych_vllm_connector.records.item_fields import ENCODER_FIELDS, is_for_language_model
from triptych_vllm_connector.versions import SUPPORTED_VLLM

NAMES = frozenset().union(*ENCODER_FIELDS.values())
CONFIG = "MultiModalFieldConfig"
# Read by the positions of one model, where vLLM keeps it off the GPU, and by the encoder alone in another.
READ_WHERE_ON_CPU = {"feature_attention_mask"}


@functools.cache
def trees(release: str) -> Mapping[str, ast.Module]:
    """Modules of the release's models with fields of items, or with positions."""
    try:
        models = source_of(release) / "model_executor" / "models"
    except SourceUnavailableError as error:
        pytest.skip(str(error))
    files = {file.stem: file.read_text() for file in sorted(models.glob("*.py"))}
    return {name: ast.parse(text) for name, text in files.items() if CONFIG in text or "mrope" in text}


def declared_fields(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the names of fields that a model's processor makes, and whether vLLM keeps them off the GPU."""
    for node in ast.walk(tree):
        pairs: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(each.arg, each.value) for each in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [
                (getattr(key, "value", None), value)
                for key, value in zip(node.keys, node.values, strict=True)
            ]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(getattr(node.targets[0].slice, "value", None), node.value)]
        for name, value in pairs:
            if (
                isinstance(name, str)
                and isinstance(value, ast.Call)
                and ast.unparse(value.func).startswith(CONFIG)
            ):
                yield name, any(each.arg == "keep_on_cpu" for each in value.keywords)


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
def test_every_field_of_every_model_is_kept_on_the_cpu_or_named(release: str) -> None:
    unnamed = {
        name
        for tree in trees(release).values()
        for name, is_on_cpu in declared_fields(tree)
        if not is_on_cpu and name not in NAMES
    }
    # The positions of MiniCPM-V 4.6 follow from them; the first one sizes a placeholder.
    assert unnamed == {"audio_feature_lengths", "tgt_sizes", "video_tgt_sizes"}


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
def test_no_named_field_is_read_by_any_models_positions(release: str) -> None:
    read = {
        node.value
        for tree in trees(release).values()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(part in function.name for part in ("mrope", "xdrope", "iter_mm_"))
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_feature_lengths"} <= read
    assert read & NAMES <= READ_WHERE_ON_CPU


@pytest.mark.parametrize(
    ("name", "keep_on_cpu", "declared", "is_kept"),
    [
        ("pixel_values", False, (), False),
        ("pixel_values", True, (), True),
        ("pixel_values", False, ("pixel_values",), True),
        ("second_per_grid_ts", False, (), True),
        ("unheard_of", False, (), True),
    ],
)
def test_a_field_is_dropped_by_its_name_alone(
    name: str, keep_on_cpu: bool, declared: tuple[str, ...], is_kept: bool
) -> None:
    element = SimpleNamespace(field=SimpleNamespace(keep_on_cpu=keep_on_cpu))
    assert is_for_language_model(name, element, declared) is is_kept
