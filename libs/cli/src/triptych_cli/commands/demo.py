"""`demo`: the whole system in the foreground, held-out handwriting through it, and a clean end."""

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
from PIL import Image
from rich.color import Color
from rich.markup import escape
from rich.style import Style
from rich.text import Text

from triptych_cli.console import StartProgress, err, fail, out, show_tail, show_waterfall
from triptych_cli.options import SystemOptions
from triptych_cli.settings import CHECKOUT, CliSettings, caller_environment
from triptych_cli.supervisor.launch import Launch, prepare
from triptych_cli.supervisor.service import StartFailedError
from triptych_cli.supervisor.state import SystemStatus, try_write_status
from triptych_cli.supervisor.supervisor import (
    Supervisor,
    clear_leftovers,
    ended_by_signals,
    is_supervised,
    run_directory,
)
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import LaunchError
from triptych_cli.system.preflight import preflight
from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import delete_deployment
from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_trace

PREFIX = "triptych-demo-"
LOGS_PREFIX = f"{PREFIX}logs-"
UNLOCKED_AGE_S = 60.0  # a folder this young may be about to be locked by its demo

UPPER_HALF = "▀"
SAMPLES = CHECKOUT / "models" / "digits-vl" / "samples"
PROMPT = "read the digits"
ENCODE_SPAN = "encoder.encode"
HANDOVER_SPANS = frozenset({ENCODE_SPAN, "prefill.inject"})
"""Spans of a picture that an encoder encodes for another instance."""
REQUEST_LIMIT_S = 120.0
TRACE_LIMIT_S = 5.0
TIDY_LIMIT_S = 10.0
INTERRUPTED = 130
UNWANTED = frozenset(
    {"TRIPTYCH_OTLP_ENDPOINT", "TRIPTYCH_API_KEYS", "TRIPTYCH_API_KEYS_FILE", "TRIPTYCH_CONFIG"}
)


def base_folder() -> Path:
    """Parent of the demos' run directories, beside that of `up`."""
    return CliSettings().run_dir.parent.resolve()


@contextmanager
def private_layout() -> Iterator[RunLayout]:
    """Folders for one demo, removed at its end. Raises OSError: they cannot be made."""
    base = base_folder()
    base.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folders = []
        for prefix, place in ((PREFIX, base), (LOGS_PREFIX, Path(tempfile.gettempdir()))):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folders.append(folder)
        layout = RunLayout(folders[0], folders[1])
        descriptor = os.open(layout.state_dir, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `sweep` leaves a locked folder alone
        yield layout


def sweep() -> None:
    """Remove what killed demos of this user have left; other users' folders are not touched."""
    for folder in base_folder().glob(f"{PREFIX}*"):
        layout = RunLayout(folder, folder)
        with contextlib.suppress(FileNotFoundError):  # another sweep, or its demo, was faster
            if _is_ours(folder) and layout.lock_file.exists() and not is_supervised(layout):
                clear_leftovers(layout)
                shutil.rmtree(folder, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{LOGS_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if _is_ours(folder) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _is_abandoned(folder: Path) -> bool:
    """True if no demo holds the folder's lock, or is about to."""
    if time.time() - folder.lstat().st_mtime < UNLOCKED_AGE_S:
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def half_blocks(file: Path, height: int = 16, max_width: int = 100) -> Text:
    """Image in `file` as half blocks of colour, `height` pixels high (half as many lines)."""
    with Image.open(file) as image:
        width = max(1, min(max_width, round(image.width * height / image.height)))
        pixels = image.convert("RGB").resize((width, height - height % 2)).tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    rows = [colours[at : at + width] for at in range(0, len(colours), width)]
    text = Text()
    for upper_row, lower_row in zip(rows[::2], rows[1::2], strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            text.append(UPPER_HALF, Style(color=upper, bgcolor=lower))
        text.append("\n")
    return text


@dataclass(frozen=True)
class DemoSample:
    """One picture of held-out handwriting, and its text."""

    file: Path
    digits: str  # "3 1 4"


@dataclass(frozen=True)
class DemoAnswer:
    text: str
    request_id: str
    first_token_ms: float
    total_ms: float


class DemoFailedError(Exception):
    """The system ran, but did not do what it should."""


def load_samples(folder: Path, count: int) -> list[DemoSample]:
    """The first `count` samples of three digits or more, then others. Raises LaunchError: there are none."""
    try:
        listing = json.loads((folder / "samples.json").read_text())
        samples = [DemoSample(folder / each["file"], each["digits"]) for each in listing]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"the demo's pictures cannot be read from {folder}: {error}") from None
    samples.sort(key=lambda sample: len(sample.digits) < len("0 0 0"))
    if not samples:
        raise LaunchError(f"there are no pictures in {folder}")
    return samples[:count]


def demo(options: SystemOptions, num_images: int) -> int:
    """Set up, show, stop; 0 if the pictures were read, 130 after Ctrl-C, 1 otherwise."""
    try:
        sweep()
        samples = load_samples(SAMPLES, num_images)
        with private_layout() as layout:
            launch = prepare(options, layout, deployment=f"demo-{uuid.uuid4().hex[:8]}")
            preflight(launch.options)
            launch = replace(launch, env=demo_environment(caller_environment()))
            return asyncio.run(_run(launch, samples))
    except (StartFailedError, LaunchError, DemoFailedError, TriptychError, OSError) as error:
        fail(str(error))
    except OpenAIError as error:
        fail(f"the request failed: {error}")
    except (asyncio.CancelledError, KeyboardInterrupt):
        err.print("stopped; nothing is left running")
        return INTERRUPTED
    return 1


def demo_environment(caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without variables that redirect the demo's spans, or require a key."""
    return {
        name: value
        for name, value in caller.items()
        if not name.upper().startswith("OTEL_") and name.upper() not in UNWANTED
    }


async def _run(launch: Launch, samples: list[DemoSample]) -> int:
    try:
        await _run_system(launch, samples)
    finally:
        if launch.options.redis_url is not None:
            await _tidy_redis(launch.options.redis_url, launch.options.deployment)
    out.print("every process has ended; sockets and shared memory are gone")
    return 0


async def _run_system(launch: Launch, samples: list[DemoSample]) -> None:
    layout = launch.layout
    progress = StartProgress()

    def on_change(status: SystemStatus) -> None:
        try_write_status(layout.state_file, status)
        progress.update(status)

    with run_directory(layout):
        supervisor = launch.supervisor(on_change)
        out.print(f"[bold]Starting[/] [dim]in {layout.run_dir}[/]")
        try:
            with ended_by_signals(supervisor), progress:
                async with supervisor.running():
                    progress.close()
                    stages = HANDOVER_SPANS if launch.options.counts.encoders else frozenset()
                    await _show(supervisor, layout, samples, stages)
                    out.print("\n[bold]Stopping[/]")
        except StartFailedError as error:
            show_tail(error.log_file)
            raise
        except (DemoFailedError, OpenAIError):
            show_tail(layout.log_file("gateway-0"), 15)
            raise


async def _tidy_redis(url: str, deployment: str) -> None:
    """Delete the demo's deployment, so that nothing stays in a Redis that the user named."""
    try:
        async with (
            asyncio.timeout(TIDY_LIMIT_S),
            await AsyncBus.connect(url, deployment, client_name="demo") as bus,
        ):
            await delete_deployment(bus)
    except (TriptychError, OSError) as error:  # a time limit is an OSError; how the demo ended comes first
        why = str(error) or "no answer"
        fail(f"Redis could not be tidied; keys triptych:{deployment}:* may be left in it: {why}")


async def _show(
    supervisor: Supervisor, layout: RunLayout, samples: list[DemoSample], stages: frozenset[str]
) -> None:
    """Ask about each picture once, then about the first again; `stages` are spans of a first trace."""
    async with AsyncOpenAI(
        base_url=supervisor.endpoint,
        api_key="none",
        timeout=REQUEST_LIMIT_S,
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(trust_env=False),  # this machine alone: no proxy
    ) as client:
        model = (await client.models.list()).data[0].id
        out.print(f"\n[bold]{supervisor.endpoint}[/] serves [bold]{escape(model)}[/]")
        first: DemoAnswer | None = None
        num_right = 0
        for sample in samples:
            answer = await _ask_and_show(client, model, sample)
            num_right += answer.text == sample.digits
            if first is None:
                first = answer
                show_waterfall(await _trace_of(layout, answer, stages))
        if first is None or num_right == 0:
            raise DemoFailedError("no picture was read right")
        out.print("\n[bold]The first picture again[/]: what was computed of it is still there")
        again = await _ask_and_show(client, model, samples[0])
        spans = await _trace_of(layout, again)
        show_waterfall(spans)
        if again.text != first.text:
            raise DemoFailedError(
                f"the same picture was read differently: {again.text!r}, {first.text!r} before"
            )
        if any(span.name == ENCODE_SPAN for span in spans):
            raise DemoFailedError("the same picture was encoded again")
        first_ms, again_ms = first.first_token_ms, again.first_token_ms
        out.print(f"no encode; first token after {again_ms:.0f} ms, {first_ms:.0f} ms before")


async def _ask_and_show(client: AsyncOpenAI, model: str, sample: DemoSample) -> DemoAnswer:
    out.print(f"\n[dim]{_short(sample.file)}[/]", soft_wrap=True)
    if out.is_terminal:
        out.print(half_blocks(sample.file))
    answer = await ask(client, model, sample.file)
    mark = "[green]✓[/]" if answer.text == sample.digits else "[red]✗[/]"
    out.print(f"expected  {sample.digits}")
    out.print(
        f"answer    {escape(answer.text)} {mark}  [dim]first token {answer.first_token_ms:.0f} ms, "
        f"whole {answer.total_ms:.0f} ms, request {answer.request_id}[/]",
        soft_wrap=True,
    )
    return answer


async def ask(client: AsyncOpenAI, model: str, file: Path) -> DemoAnswer:
    """One streamed request about one picture."""
    media = await asyncio.to_thread(file.read_bytes)
    url = f"data:image/png;base64,{base64.b64encode(media).decode()}"
    start = time.monotonic()
    first_at: float | None = None
    pieces: list[str] = []
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": PROMPT},
                ],
            }
        ],
        stream=True,
        temperature=0.0,
        max_tokens=32,
    )
    request_id = raw.headers.get("x-request-id", "")
    async for chunk in raw.parse():
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_at = first_at or time.monotonic()
            pieces.append(piece)
    end = time.monotonic()
    return DemoAnswer(
        "".join(pieces).strip(), request_id, ((first_at or end) - start) * 1e3, (end - start) * 1e3
    )


async def _trace_of(
    layout: RunLayout, answer: DemoAnswer, stages: frozenset[str] = frozenset()
) -> list[SpanRecord]:
    """Trace of the answer, once its root span, those of `stages` and the engines' have arrived.

    Files cannot be awaited: they are read until no more spans come, for at most `TRACE_LIMIT_S`.
    """
    deadline = time.monotonic() + TRACE_LIMIT_S
    spans: list[SpanRecord] = []
    while time.monotonic() < deadline:
        before = len(spans)
        spans = await asyncio.to_thread(read_trace, layout.traces_dir, answer.request_id)
        is_whole = any(span.is_root for span in spans) and stages <= {span.name for span in spans}
        if is_whole and len(spans) == before:
            return spans
        await asyncio.sleep(0.4)  # longer than the exporters' delay
    if not spans:
        raise DemoFailedError(f"request {answer.request_id} left no trace")
    return spans


def _short(file: Path) -> Path:
    return file.relative_to(CHECKOUT) if file.is_relative_to(CHECKOUT) else file
