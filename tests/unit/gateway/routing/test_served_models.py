"""The file of models; names, permissions and shares that follow from it."""

from pathlib import Path

import pytest

from triptych_common.runtime.yaml_file import MAX_FILE_BYTES
from triptych_gateway.changed_file import ChangedFile
from triptych_gateway.routing.served_models import ModelsFile, ModelsFileError, ServedModels, read_models_file

TEXT = """
aliases: {gpt-4o: qwen, gpt-4o-mini: qwen}
shares:
  qwen: {"1": 90, "2": 10}
version_header: true
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path) -> None:
    models = ServedModels.of_file(written(tmp_path, TEXT))
    assert [models.resolve(name) for name in ("gpt-4o", "qwen", "other")] == ["qwen", "qwen", "other"]
    assert models.aliases_of("qwen") == ["gpt-4o", "gpt-4o-mini"]
    assert models.shares_of("qwen", None) == models.shares_of("french", "qwen") == {"1": 90, "2": 10}
    assert models.shares_of("other", None) is None
    assert models.content.version_header
    assert ServedModels.of_file(written(tmp_path, "")).content == ModelsFile() == ServedModels().content


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("aliases: {a: b, b: c}", "a leads to b, which is an alias itself"),
        ("aliases: {a: a}", "a leads to a"),
        ("aliases: {a: b}\nshares: {a: {'1': 1}}", "a is an alias"),
        ("shares: {m: {'1': 0}}", "no version of m has a weight"),
        ("shares: {m: {}}", "shares.m"),
        ("shares: {m: {'1': -1}}", "shares.m.1"),
        ("shares: {m: {'1': 1.5}}", "shares.m.1"),
        ("shares: {m: {'no spaces': 1}}", "no spaces"),
        ("shares: {m: {1: 1}}", "shares.m"),
        ("version_header: 1", "version_header"),
        ("session_header: 'a b'", "session_header"),
        ("alias: {}", "alias"),
        ("- a", "the file"),
        ("a: [", "not valid YAML"),
        ("aliases: {a: 2025-02-30}", "not valid YAML"),
        ("aliases: {a: 0x_}", "not valid YAML"),
        ("version_header: !!bool maybe", "not valid YAML"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ModelsFileError, match="the file of models") as caught:
        read_models_file(written(tmp_path, text))
    assert fault in str(caught.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelsFileError, match="cannot be read"):
        read_models_file(tmp_path / "none")


@pytest.mark.parametrize(
    ("allowed", "asked", "permitted"),
    [
        ({"qwen"}, "qwen", "qwen"),
        ({"qwen"}, "gpt-4o", "qwen"),  # what it may use has another name, too
        ({"gpt-4o"}, "gpt-4o", "gpt-4o"),
        ({"gpt-4o"}, "qwen", None),  # a key for a name alone
        ({"gpt-4o"}, "gpt-4o-mini", None),
        ({"gpt-4o"}, "", "gpt-4o"),  # it names none, and there is but one
        ({"other"}, "", None),
    ],
)
def test_what_a_key_may_ask_for(tmp_path: Path, allowed: set[str], asked: str, permitted: str | None) -> None:
    models = ServedModels.of_file(written(tmp_path, TEXT))
    assert models.permitted_name("qwen", asked, allowed.__contains__) == permitted


def test_a_changed_file_is_read_once(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    file = ChangedFile(path, read_models_file)
    assert file.try_read() == ModelsFile()
    assert file.try_read() is None
    path.write_text("a: [")
    with pytest.raises(ModelsFileError):
        file.try_read()
    assert file.try_read() is None, "it has not changed since"
    other = tmp_path / "other"
    other.write_text(TEXT)
    other.replace(path)
    content = file.try_read()
    assert content is not None
    assert content.version_header
    path.unlink()
    for _ in range(2):
        with pytest.raises(ModelsFileError, match="cannot be read"):
            file.try_read()
