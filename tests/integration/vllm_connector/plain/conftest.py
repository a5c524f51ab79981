"""A real store, and engines with both sides of the plain connector."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.plain_engine import PlainEngine


@pytest.fixture
def stopped_store(run_dir: Path) -> Iterator[StoreProcess]:
    """Not started yet."""
    store = StoreProcess(run_dir, region_bytes=2 << 20)
    yield store
    store.close()


@pytest.fixture
def store(stopped_store: StoreProcess) -> StoreProcess:
    stopped_store.start()
    return stopped_store


@pytest.fixture
def make_engine(stopped_store: StoreProcess) -> Iterator[Callable[..., PlainEngine]]:
    engines: list[PlainEngine] = []

    def make(role: str, **options: Any) -> PlainEngine:
        engines.append(PlainEngine(stopped_store, f"e{len(engines)}", role, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def encoder(store: StoreProcess, make_engine: Callable[..., PlainEngine]) -> PlainEngine:
    return make_engine("ec_producer")


@pytest.fixture
def consumer(store: StoreProcess, make_engine: Callable[..., PlainEngine]) -> PlainEngine:
    return make_engine("ec_consumer", item_timeout_s=0)
