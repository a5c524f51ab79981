"""Models that pool: the JSON of vLLM's own server on the same weights, but for ids and times.

Two kinds: the demo model, whose last hidden states are its embeddings, and a classifier of text alone.
"""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.real.answers import answer_of, post
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import EXACT, MODEL, Server, System, running_monolith, running_system
from tests.support.real.text_models import make_classifier

pytestmark = [pytest.mark.engine, pytest.mark.long]

EMBEDDING = ("--runner=pooling", "--convert=embed")
TEXTS = ["read the digits", "1 2 3", "read the digits 1 2 3 " * 20]
EMBEDDED: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/v1/embeddings", {"input": TEXTS[0]}),
    "texts": ("/v1/embeddings", {"input": TEXTS}),
    "token ids": ("/v1/embeddings", {"input": [[7, 8, 9], [10, 11]]}),
    "base64": ("/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64"}),
    "a chat": ("/v1/embeddings", {"messages": [{"role": "user", "content": TEXTS[0]}]}),
    "pooling": ("/pooling", {"input": TEXTS, "task": "embed"}),
    "score": ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    "score under v1": ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    "rerank": ("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
    "rerank under v1": ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}),
    "rerank under v2": ("/v2/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
}
CLASSIFIED: dict[str, tuple[str, dict[str, Any]]] = {
    "classify": ("/classify", {"input": TEXTS}),
    "classify one": ("/classify", {"input": TEXTS[0]}),
    "pooling": ("/pooling", {"input": TEXTS, "task": "classify"}),
}
WITHOUT_ENCODERS = ("--encoders=0", "--local-encode=fallback")


@contextlib.contextmanager
def both(folder: Path, model: Path, *options: str) -> Iterator[tuple[System, Server]]:
    """Triptych, and a monolithic vLLM, one after the other: each is asked alone."""
    with (
        running_system(
            *WITHOUT_ENCODERS,
            f"--prefill-decode-args={shlex.join([*EXACT, *options])}",
            model=model,
        ) as system,
        running_monolith(folder, *options, model=model) as monolith,
    ):
        yield system, monolith


def compare(system: Server, monolith: Server, path: str, body: dict[str, Any], model: str) -> None:
    got, wanted = (answer_of(post(server, path, body | {"model": model})) for server in (system, monolith))
    assert alike(got, wanted), f"{path} {body}\ngot {got}\nwanted {wanted}"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Server]]:
    with both(tmp_path_factory.mktemp("embedding"), MODEL, *EMBEDDING) as servers:
        yield servers


@pytest.fixture(scope="module")
def classifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Server]]:
    folder = tmp_path_factory.mktemp("classifying")
    with both(folder, make_classifier(folder / "classifier")) as servers:
        yield servers


@pytest.mark.parametrize("name", EMBEDDED)
def test_embeddings_scores_and_ranks(embedding: tuple[System, Server], name: str) -> None:
    compare(*embedding, *EMBEDDED[name], MODEL.name)


@pytest.mark.parametrize("name", CLASSIFIED)
def test_classes(classifying: tuple[System, Server], name: str) -> None:
    compare(*classifying, *CLASSIFIED[name], "classifier")


def test_what_generates_is_not_served(embedding: tuple[System, Server]) -> None:
    for path, inputs in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/classify", {"input": "a"}),
    ):
        got, wanted = (post(server, path, inputs) for server in embedding)
        assert got.status_code == wanted.status_code, f"{path}: {got.text}\n{wanted.text}"
        assert got.json()["error"]["code"] == "endpoint_not_served", path
