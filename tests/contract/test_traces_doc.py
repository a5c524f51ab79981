"""docs/reference/traces.md lists exactly the spans of the code and the attributes of a request's span."""

import ast
import re

from tests.contract.product_sources import ROOT, SOURCES
from triptych_common.telemetry.span_records import STAGE_PREFIX, STAGE_SUFFIX
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.tracing import attributes
from triptych_gateway.tracing.timings import Stage

PAGE = (ROOT / "docs" / "reference" / "traces.md").read_text()
MAKERS = {"span", "_span", "_timed_span", "record_span", "_record_span"}
VLLMS = "llm_request"
ATTRIBUTE = re.compile(r"`((?:gen_ai|http|url|client|error|triptych)\.[a-z_.]+)`")


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.name`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def section(title: str) -> str:
    """Up to the next heading of any level."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", section(title), re.MULTILINE))


def spans_of_code() -> set[str]:
    """Constant names that spans are made with."""
    return {
        call.args[0].value
        for file in SOURCES
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and name_of(call.func) in MAKERS
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def attributes_of_code() -> set[str]:
    """Of the request's span: the names that have constants, and those that are set on it by name."""
    named = {value for name, value in vars(attributes).items() if name.isupper() and "." in str(value)}
    by_name = {
        text
        for file in SOURCES
        if "triptych_gateway" in file.parts
        for text in re.findall(r'root\.set_attribute\(\s*"([^"]+)"', file.read_text())
    }
    return named | by_name


def test_spans() -> None:
    made = spans_of_code()
    assert {"gateway.media", "encoder.encode", "prefill.inject", "queue.encode_job"} <= made, "found at all"
    assert rows("Spans") == made | {f"{CHAT.operation} {{model}}", VLLMS}


def test_attributes_of_the_requests_span() -> None:
    made = attributes_of_code()
    assert "triptych.decision" in made, "found at all"
    described = set(ATTRIBUTE.findall(section("The request's span")))
    others = {"triptych.request_id", "triptych.api_key_name", "triptych.tenant", "triptych.kept_for"}
    assert described == made | others


def test_stages() -> None:
    assert rows("Time to first token by stage") == {f"{STAGE_PREFIX}{stage}{STAGE_SUFFIX}" for stage in Stage}
