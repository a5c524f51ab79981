"""The file of routing profiles: what it says counts, and every fault is named with its place."""

from pathlib import Path

import pytest

from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.scheduling.profiles import (
    BUILT_IN,
    MAX_FILE_BYTES,
    RoutingFileError,
    RoutingProfiles,
    read_profiles,
)

WHOLE, PREFILL, DECODE = ServingStage.WHOLE, ServingStage.PREFILL, ServingStage.DECODE


def read(tmp_path: Path, text: str | bytes) -> RoutingProfiles:
    path = tmp_path / "routing.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_profiles(path)


def test_without_a_file_the_built_in_profiles_count() -> None:
    assert read_profiles(None) is BUILT_IN
    assert BUILT_IN.of_stage(PREFILL).weights["kv"] == 0
    assert BUILT_IN.of_stage(PREFILL).weights["prefix"] == BUILT_IN.default.weights["prefix"]
    assert BUILT_IN.of_stage(DECODE).weights["kv"] > BUILT_IN.of_stage(WHOLE).weights["kv"]


def test_a_default_replaces_the_built_in_ones(tmp_path: Path) -> None:
    profiles = read(
        tmp_path, "default: {weights: {queue: 1}, picker: weighted_random}\nprefill: {weights: {kv: 2}}"
    )
    assert profiles.of_stage(WHOLE).weights == {"queue": 1}
    assert profiles.of_stage(PREFILL).weights == {"queue": 1, "kv": 2}
    assert {profiles.of_stage(stage).picker for stage in ServingStage} == {"weighted_random"}


def test_a_stage_alone_changes_the_built_in_one(tmp_path: Path) -> None:
    profiles = read(tmp_path, "decode: {weights: {kv: 9}, full_above: 0.5}\n")
    decode = BUILT_IN.of_stage(DECODE)
    assert profiles.of_stage(DECODE).weights == {**decode.weights, "kv": 9}
    assert profiles.of_stage(DECODE).full_above == 0.5
    assert profiles.of_stage(PREFILL) == BUILT_IN.of_stage(PREFILL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default: {weights: {prefx: 1}}", ["default.weights", "prefx", "prefix, session"]),
        ("default: {weights: {prefix: -1}}", ["default.weights.prefix", "greater than or equal to 0"]),
        ("default: {weights: {prefix: .inf}}", ["default.weights.prefix"]),
        ("default: {weights: {prefix: much}}", ["default.weights.prefix", "number"]),
        ("whole: {picker: worst}", ["whole.picker", "'best'"]),
        ("whole: {filters: [ful]}", ["whole.filters.0", "'suspect'"]),
        ("whole: {filters: [full, full]}", ["whole.filters", "twice"]),
        ("whole: {full_above: 0}", ["whole.full_above"]),
        ("whole: {wieghts: {}}", ["whole.wieghts", "not permitted"]),
        ("encode: {}", ["encode", "not permitted"]),
        ("- default", ["must hold default"]),
        ("", ["must hold default"]),
        ("default: {\n", ["not valid YAML (line 2)"]),
        ("default: !!python/object/apply:os.system [ls]", ["not valid YAML"]),
        (b"\xff\xfe\xff", ["not valid YAML"]),
        ("default: !!bool maybe", ["not valid YAML"]),
        ("#" * (MAX_FILE_BYTES + 1), ["larger than"]),
    ],
)  # fmt: skip
def test_a_fault_is_named(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    with pytest.raises(RoutingFileError) as caught:
        read(tmp_path, text)
    assert "routing.yaml" in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RoutingFileError, match="No such file"):
        read_profiles(tmp_path / "none.yaml")
