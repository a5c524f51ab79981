"""A spawned child is not part of its host; a forked one was."""

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from triptych_vllm_connector import versions
from triptych_vllm_connector.host.process_start import spawn_engines

PROBE = """
import asyncio, importlib, multiprocessing, os, signal, sys


def child(ready):  # like EngineCore, which has a handler of its own
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    ready.set()
    while not ended:
        signal.pause()
    os._exit(0)


async def main():
    seen = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, seen.append, 1)
    context = multiprocessing.get_context(sys.argv[1])
    ready = context.Event()
    process = context.Process(target=child, args=(ready,), daemon=True)
    process.start()
    await asyncio.to_thread(ready.wait)
    process.terminate()
    await asyncio.to_thread(process.join)
    answered = loop.create_future()  # behind what the child may have written to the wake-up socket
    loop.add_signal_handler(signal.SIGUSR1, answered.set_result, None)
    os.kill(os.getpid(), signal.SIGUSR1)
    await answered
    print(len(seen))


if __name__ == "__main__":
    factory = importlib.import_module(sys.argv[2]).new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_to_a_spawned_engine_does_not_reach_its_host(loop: str, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    seen = {}
    for method in ("spawn", "fork"):
        ended = subprocess.run(
            [sys.executable, script, method, loop], capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
        seen[method] = int(ended.stdout)
    assert seen["spawn"] == 0
    if sys.version_info < (3, 12):
        assert seen["fork"] == 1, "why vLLM's default is not taken"


@pytest.mark.parametrize(("given", "method"), [(None, "spawn"), ("fork", "fork")])
def test_vllm_spawns_unless_the_user_says(
    given: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    spawn_engines()
    assert method == envs.VLLM_WORKER_MULTIPROC_METHOD


@pytest.fixture(params=["encoder", "prefill_decode"])
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A host's main module, whose service and vLLM cannot be imported."""
    main = importlib.import_module(f"triptych_{request.param}.__main__")
    settings = next(each for name, each in vars(main).items() if name.endswith("Settings"))
    loaded = SimpleNamespace(instance="i-0", log_level="INFO")
    monkeypatch.setattr(settings, "load", lambda *_: loaded)
    monkeypatch.setattr(sys, "argv", [request.param])
    for name in (f"triptych_{request.param}.service", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    return main


def test_both_hosts_do_so_and_log_versions_before_they_import_vllm(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class StartedError(Exception):
        pass

    def started() -> None:
        raise StartedError

    monkeypatch.setattr(main, "spawn_engines", started)
    with logs_restored(), pytest.raises(StartedError):
        main.main()
    line = json.loads(capsys.readouterr().err)
    found = {name: line[name] for name in ("text", "vllm", "supported")}
    supported = list(versions.SUPPORTED_VLLM)
    assert found == {"text": "engine starts", "vllm": versions.vllm_version(), "supported": supported}


@pytest.mark.parametrize("installed", ["0.31.9", None])
def test_both_hosts_name_an_unsupported_version_before_they_import_it(
    installed: str | None,
    main: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def version(distribution: str) -> str:
        if installed is None or distribution != "vllm":
            raise PackageNotFoundError(distribution)
        return installed

    monkeypatch.setattr(versions, "version", version)
    with logs_restored(), pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    line = json.loads(capsys.readouterr().err)
    assert line["instance"] == "i-0"
    assert line["kind"] == "UnsupportedVLLMError"
    assert all(each in line["error"] for each in versions.SUPPORTED_VLLM)
    assert installed is None or f"vllm {installed} is installed" in line["error"]


@contextmanager
def logs_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
