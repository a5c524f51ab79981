"""The documents match the code: every message, field, value and setting, and no others."""

import importlib.util
import inspect
import re
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from pydantic_settings import BaseSettings

from triptych_cache_store.settings import StoreSettings
from triptych_cli.settings import CliSettings, GpuSettings
from triptych_common.cores.mps import CudaEnvironment
from triptych_common.protocol import messages, names, store, transfers
from triptych_common.protocol.messages import Message
from triptych_common.redis_client.rights import RIGHTS, rules
from triptych_common.runtime import ServiceSettings
from triptych_encoder.settings import EncoderSettings
from triptych_fabric.settings import FabricSettings
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.request.named_items import MediaFacts
from triptych_gateway.settings import GatewaySettings
from triptych_prefill_decode.settings import PrefillDecodeSettings

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md")
DOCS = sorted(file for place in PLACES for file in ROOT.glob(place))
PROTOCOL = (ROOT / "docs" / "reference" / "protocol.md").read_text()
CONFIGURATION = (ROOT / "docs" / "reference" / "configuration.md").read_text()

HEADING = re.compile(r"^#{2,5} +(.+)$", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \| (.*)$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """Body of each section, up to the next heading of any level, by its heading's first word in backticks."""
    found: dict[str, str] = {}
    headings = list(HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        title = re.sub(r"^`([^`]+)`.*$", r"\1", heading[1])
        found[title] = text[heading.end() : following.start() if following else len(text)]
    return found


def rows(section: str) -> set[str]:
    """First cells, in backticks, of the tables of a section."""
    return {match[1] for match in ROW.finditer(section)}


def classes_of(module: ModuleType, base: type) -> list[type]:
    """Subclasses of `base` that `module` itself defines."""
    defined = [
        each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
    ]
    return [each for each in defined if issubclass(each, base) and each is not Message]


def wire_classes() -> list[type[Message]]:
    return [each for module in (messages, transfers, store) for each in classes_of(module, Message)]


def enums() -> list[type[StrEnum]]:
    return [each for module in (messages, transfers) for each in classes_of(module, StrEnum)]


def own_fields(cls: type[Message]) -> set[str]:
    """Without what all frames have."""
    common = set() if cls is store.StoreFrame or not issubclass(cls, store.StoreFrame) else {"seq", "kind"}
    return set(cls.model_fields) - common


@pytest.mark.parametrize("cls", wire_classes(), ids=lambda cls: cls.__name__)
def test_protocol_lists_exactly_the_fields(cls: type[Message]) -> None:
    described = rows(sections(PROTOCOL)[cls.__name__])
    if cls is store.StoreFailure:  # its section also has the table of codes
        described -= set(get_args(cls.model_fields["code"].annotation))
    assert described == own_fields(cls)


@pytest.mark.parametrize("enum", enums(), ids=lambda enum: enum.__name__)
def test_protocol_lists_exactly_the_values(enum: type[StrEnum]) -> None:
    assert rows(sections(PROTOCOL)[enum.__name__]) == {str(value) for value in enum}


def test_protocol_lists_the_kinds_of_frames() -> None:
    for cls in wire_classes():
        if issubclass(cls, store.StoreFrame) and "kind" in cls.model_fields:
            heading = f"#### `{cls.__name__}` (`{cls.model_fields['kind'].default}`)"
            assert heading in PROTOCOL, heading


def test_protocol_lists_the_failure_codes() -> None:
    codes = set(get_args(store.StoreFailure.model_fields["code"].annotation))
    assert codes == rows(sections(PROTOCOL)["StoreFailure"]) - own_fields(store.StoreFailure)


def test_protocol_lists_the_cached_sizes() -> None:
    assert rows(sections(PROTOCOL)["ItemSizes"]) == set(ItemSizes.model_fields)


def test_protocol_lists_the_facts_of_named_items() -> None:
    assert rows(sections(PROTOCOL)["MediaFacts"]) == set(MediaFacts.model_fields)


def test_protocol_lists_every_stream_and_key() -> None:
    known = names.StreamNames("d")
    made: set[str] = set()
    for name, member in vars(names.StreamNames).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            made.add(getattr(known, name))
        elif inspect.isfunction(member):
            arguments = list(inspect.signature(member).parameters)[1:]
            made.add(member(known, *(f"{{{each}}}" for each in arguments)))
    made = {each.removeprefix("triptych:d:") for each in made}
    found = sections(PROTOCOL)
    assert made == rows(found["Streams"]) | rows(found["Keys"])


def test_protocol_names_the_versions() -> None:
    section = sections(PROTOCOL)["Versions"]
    assert f"`SCHEMA_VERSION` {messages.SCHEMA_VERSION}" in section
    assert f"`STORE_PROTOCOL_VERSION` {store.STORE_PROTOCOL_VERSION}" in section


SETTINGS: dict[str, tuple[type[BaseSettings], ...]] = {
    "Every service": (ServiceSettings,),
    "Gateway": (GatewaySettings,),
    "Encoder": (EncoderSettings,),
    "Prefill_decode": (PrefillDecodeSettings,),
    "Cache_store": (StoreSettings,),
    "Fabric agent": (FabricSettings,),
}


@pytest.mark.parametrize("title", SETTINGS)
def test_configuration_lists_exactly_the_settings(title: str) -> None:
    described = {match[1]: match[2] for match in ROW.finditer(sections(CONFIGURATION)[title])}
    defaults: dict[str, object] = {}
    for cls in SETTINGS[title]:
        shared = {} if cls is ServiceSettings else ServiceSettings.model_fields
        for name, field in cls.model_fields.items():
            if name not in shared or field.default != shared[name].default:
                defaults[f"{cls.model_config.get('env_prefix', '')}{name}".upper()] = field.default
    assert described.keys() == defaults.keys()
    for name, default in defaults.items():
        if isinstance(default, (str, int, float)):
            assert described[name].startswith(f"`{default}`"), f"{name}: the default is {default}"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """What writes the tables of settings."""
    file = ROOT / "docs" / "write_configuration.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_settings_are_those_of_the_classes(writer: ModuleType) -> None:
    assert writer.written(CONFIGURATION) == CONFIGURATION, "run: python docs/write_configuration.py"
    assert list(writer.SECTIONS) == list(SETTINGS)


def test_configuration_lists_exactly_the_rights_in_redis() -> None:
    section = sections(CONFIGURATION)["Rights in Redis"]
    (user,) = re.findall(r"^user triptych on >PASSWORD (.*)$", section, re.MULTILINE)
    assert tuple(user.split(" ")) == rules("default")
    lines = section.splitlines()
    for right in RIGHTS:
        command = f"`+{right.command}`".replace("|", r"\|")
        is_optional = f"| {command} | {right.without} |" in lines
        assert is_optional == bool(right.without), right
        (row,) = [line for line in lines if line.startswith(f"| {right.used_for} |")]
        assert command in row.split(" "), right


def test_configuration_lists_the_command_lines_settings() -> None:
    wanted = {f"TRIPTYCH_{name}".upper() for name in CliSettings.model_fields}
    wanted |= {name.upper() for name in GpuSettings.model_fields}
    wanted |= {name.upper() for name in CudaEnvironment.model_fields}
    launcher = set(re.findall(r"^#   (TRIPTYCH_\w+)", (ROOT / "triptych").read_text(), re.MULTILINE))
    assert launcher
    assert rows(sections(CONFIGURATION)["Command line"]) == wanted | launcher


def anchors(doc: Path) -> set[str]:
    """Of the headings, as they are made on the web; and those that stand in rows."""
    text = doc.read_text()
    titles = [heading[1] for heading in HEADING.finditer(text)]
    made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_what_documents_point_to_is_there(doc: Path) -> None:
    text = doc.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = doc.parent / path if path else doc
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for test in re.findall(r"`(tests/[\w/.-]+)`", text):
        assert (ROOT / test).exists(), test
