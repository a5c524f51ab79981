"""Command line: names, options and help. Modules in `commands/` implement the commands."""

from pathlib import Path
from typing import Annotated

import typer

from triptych_cli.options import (
    DEFAULT_FABRIC_PORT,
    DEFAULT_MODEL_TEXT,
    DEFAULT_PORT,
    DEFAULT_REDIS_PORT,
    CorePolicyOption,
    Decodes,
    EncodePrefillDecodes,
    EncodePrefills,
    EncoderArgs,
    EncoderBounds,
    Encoders,
    Fabric,
    FabricHost,
    FabricKeyFile,
    FabricPort,
    Gateways,
    HostName,
    HostOptions,
    Join,
    LocalEncodeOption,
    Model,
    Port,
    PrefillDecodeArgs,
    PrefillDecodeBounds,
    PrefillDecodes,
    Prefills,
    RedisPort,
    RedisUrl,
    RegionBytes,
    SystemOptions,
    TopologyOption,
    parse_bounds,
)
from triptych_cli.roles import TOPOLOGIES, Bounds
from triptych_cli.settings import CliSettings
from triptych_common import release

HELP_OPTIONS = ["-h", "--help"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)
store_app = typer.Typer(help="Inspect the cache_store of the running system.", no_args_is_help=True)
streams_app = typer.Typer(help="Inspect the Redis Streams of the running system.", no_args_is_help=True)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"triptych {release()}")
        raise typer.Exit


@app.callback()
def options_of_all(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Triptych: encode, prefill and decode of multimodal models as services of their own."""


app.add_typer(store_app, name="store")
app.add_typer(streams_app, name="streams")

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def demo(
    model: Model = DEFAULT_MODEL_TEXT,
    topology: TopologyOption = None,
    encoders: Encoders = None,
    prefill_decodes: PrefillDecodes = None,
    redis_url: RedisUrl = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The gateway's port; 0: a free one.")] = 0,
    region_bytes: RegionBytes = None,
    encoder_args: EncoderArgs = "",
    prefill_decode_args: PrefillDecodeArgs = "",
    core_policy: CorePolicyOption = "text_first",
    images: Annotated[int, typer.Option(min=1, help="How many held-out images to show.")] = 3,
) -> None:
    """Start everything, read held-out handwriting, show where the time went, stop cleanly."""
    from triptych_cli.commands import demo as command
    from triptych_cli.system.machine import free_ports

    counts = TOPOLOGIES[topology or "e+pd"]
    options = SystemOptions(
        model=model,
        encoders=counts.encoders if encoders is None else encoders,
        prefill_decodes=counts.prefill_decodes if prefill_decodes is None else prefill_decodes,
        redis_url=redis_url,
        port=port or free_ports(1)[0],
        region_bytes=region_bytes,
        encoder_args=encoder_args,
        prefill_decode_args=prefill_decode_args,
        core_policy=core_policy,
        prefills=counts.prefills,
        decodes=counts.decodes,
        encode_prefills=counts.encode_prefills,
        encode_prefill_decodes=counts.encode_prefill_decodes,
    )
    raise typer.Exit(command.demo(options, images))


@app.command()
def up(
    model: Model = DEFAULT_MODEL_TEXT,
    encoders: EncoderBounds = None,
    prefill_decodes: PrefillDecodeBounds = None,
    prefills: Prefills = 0,
    decodes: Decodes = 0,
    encode_prefills: EncodePrefills = 0,
    encode_prefill_decodes: EncodePrefillDecodes = 0,
    gateways: Gateways = None,
    redis_url: RedisUrl = None,
    port: Port = DEFAULT_PORT,
    region_bytes: RegionBytes = None,
    encoder_args: EncoderArgs = "",
    prefill_decode_args: PrefillDecodeArgs = "",
    core_policy: CorePolicyOption = "text_first",
    local_encode: LocalEncodeOption = None,
    join: Join = None,
    fabric: Fabric = False,
    fabric_host: FabricHost = None,
    fabric_port: FabricPort = DEFAULT_FABRIC_PORT,
    fabric_key_file: FabricKeyFile = None,
    host: HostName = None,
    redis_port: RedisPort = DEFAULT_REDIS_PORT,
) -> None:
    """Start the system in the background; or one of its hosts (docs/guide/several-hosts.md)."""
    from triptych_cli.commands import lifecycle

    key_file = None if fabric_key_file is None else str(fabric_key_file)
    hosts = HostOptions(fabric, join is not None, host, fabric_host, fabric_port, key_file, redis_port)
    options = SystemOptions(
        model=model,
        encoders=encoders and encoders.high,
        prefill_decodes=prefill_decodes and prefill_decodes.high,
        redis_url=redis_url,
        port=port,
        region_bytes=region_bytes,
        encoder_args=encoder_args,
        prefill_decode_args=prefill_decode_args,
        gateway_host=CliSettings().host,
        gateways=gateways,
        core_policy=core_policy,
        local_encode=local_encode,
        prefills=prefills,
        decodes=decodes,
        encode_prefills=encode_prefills,
        encode_prefill_decodes=encode_prefill_decodes,
        hosts=hosts,
        min_encoders=encoders.low if encoders and encoders.is_range else None,
        min_prefill_decodes=prefill_decodes.low if prefill_decodes and prefill_decodes.is_range else None,
    )
    raise typer.Exit(lifecycle.up(options, join))


@app.command(hidden=True)
def supervise(
    progress_fd: Annotated[int, typer.Option()],
    options: Annotated[str, typer.Argument()],
    redis_url: RedisUrl = None,
) -> None:
    """The daemon that `up` leaves behind."""
    from triptych_cli.commands import lifecycle

    raise typer.Exit(lifecycle.supervise(SystemOptions.of_daemon(options, redis_url), progress_fd))


@app.command()
def down() -> None:
    """Stop the system that `up` started; nothing of it is left."""
    from triptych_cli.commands import lifecycle

    raise typer.Exit(lifecycle.down())


@app.command()
def restart(
    services: Annotated[
        list[str] | None,
        typer.Argument(show_default="all but redis", help="e.g. encoder-0, or encoder for all of them."),
    ] = None,
) -> None:
    """Restart services one after the other, each when the one before is ready again."""
    from triptych_cli.commands import scale as command

    raise typer.Exit(command.restart(services or []))


@app.command()
def stop(
    services: Annotated[list[str], typer.Argument(help="e.g. encoder-1, or encoder for all of them.")],
) -> None:
    """Stop instances; each ends what it has in hand first. The others go on."""
    from triptych_cli.commands import scale as command

    raise typer.Exit(command.stop(services))


@app.command()
def scale(
    stage: Annotated[str, typer.Argument(help="encoder, prefill_decode, prefill, decode, …")],
    number: Annotated[
        Bounds,
        typer.Argument(
            parser=parse_bounds, metavar="N|MIN..MAX", help="How many: 2, or a range such as 0..3."
        ),
    ],
) -> None:
    """Set how many instances of a stage run, up to the most of `up`; 0..3: as many as there is work for."""
    from triptych_cli.commands import scale as command

    raise typer.Exit(command.scale(stage, number))


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the services: state, pid, restarts, since when; and the hosts, where there are several."""
    from triptych_cli.commands import status as command

    raise typer.Exit(command.status(as_json))


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="Its name, as `status` shows it: the one of this machine.")],
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="How long entries may be moved to other hosts, at most.")
    ] = 300.0,
) -> None:
    """Empty this host: its entries go to other hosts, its instances drain, everything here stops."""
    from triptych_cli.commands import drain as command

    raise typer.Exit(command.drain(host, timeout_s))


@app.command()
def logs(
    service: Annotated[
        str, typer.Argument(help="e.g. gateway-0, or gateway; supervisor: what was restarted, and why")
    ],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many lines from the end.")] = 50,
) -> None:
    """Show the end of a service's log."""
    from triptych_cli.commands import lifecycle

    raise typer.Exit(lifecycle.logs(service, follow, lines))


@app.command()
def trace(request_id: Annotated[str, typer.Argument(help="The X-Request-Id of an answer.")]) -> None:
    """Draw the stages of one request as a waterfall."""
    from triptych_cli.commands import trace as command

    raise typer.Exit(command.trace(request_id))


@app.command("test", context_settings=PASS_THROUGH)
def run_tests(
    context: typer.Context,
    layer: Annotated[
        str | None, typer.Argument(help="unit, property, contract, integration, engine, chaos, gpu or all")
    ] = None,
) -> None:
    """Run the tests; further arguments go to pytest."""
    from triptych_cli.commands import bench as command

    raise typer.Exit(command.run_script("tests/support/layers.py", [layer or "", *context.args]))


@app.command(context_settings={**PASS_THROUGH, "help_option_names": []})  # NAME --help is NAME's own
def bench(
    context: typer.Context, name: Annotated[str | None, typer.Argument(help="Without: what there is.")] = None
) -> None:
    """Run one of benchmarks/; further arguments go to it, --help too."""
    from triptych_cli.commands import bench as command

    if name in HELP_OPTIONS:
        typer.echo(context.get_help())
        raise typer.Exit
    raise typer.Exit(command.bench(name, context.args))


@app.command()
def soak(
    part: Annotated[str, typer.Argument(help="What to wear out: store, system.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="The same seed kills in the same order.")] = 0,
    report: Annotated[Path | None, typer.Option("--json", help="Write the report there (system).")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            show_default="fast",
            help="fast: vLLM is stood in for; real: vLLM on the CPU; hosts: fast on three hosts (system).",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(show_default="e+pd", help="e+pd, or all: instances of every role (system, fast)."),
    ] = None,
) -> None:
    """Soak-test one part while its processes are killed at random; 1 if anything was wrong."""
    from triptych_cli.commands import bench as command

    raise typer.Exit(command.soak(part, minutes, seed, report, engine, topology))


@app.command()
def check(
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what the files that differ from main touch.")
    ] = False,
) -> None:
    """Format, lint, types, import rules, unit and contract tests."""
    from triptych_cli.commands import bench as command

    raise typer.Exit(command.run_script("tests/support/check.py", ["--changed"] if changed else []))


@app.command()
def doctor() -> None:
    """Report what is missing or wrong on this machine."""
    from triptych_cli.commands import doctor as command

    raise typer.Exit(command.doctor())


@store_app.command("stats")
def store_stats() -> None:
    """Show the store's metrics: bytes by state, counters, ages, seal to pin."""
    from triptych_cli.commands import store

    raise typer.Exit(store.stats())


@store_app.command("verify")
def store_verify(evict: Annotated[bool, typer.Option("--evict", help="Damaged entries go.")] = False) -> None:
    """Check header and checksum of every sealed entry."""
    from triptych_cli.commands import store

    raise typer.Exit(store.verify(evict))


@store_app.command("ls")
def store_ls(limit: Annotated[int, typer.Option(min=1, help="How many entries at most.")] = 100) -> None:
    """List the entries: content hash, state, shape, pins, age."""
    from triptych_cli.commands import store

    raise typer.Exit(store.ls(limit))


@store_app.command("evict")
def store_evict(
    mm_hash: Annotated[str | None, typer.Argument(help="Content hash, or its beginning.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Evict every entry that is not pinned.")] = False,
) -> None:
    """Evict one entry, or all that are not pinned."""
    from triptych_cli.commands import store

    raise typer.Exit(store.evict(mm_hash, everything))


@streams_app.command("peek")
def streams_peek(
    stream: Annotated[
        str, typer.Argument(help="A name or its beginning: encode-jobs, metadata:prefill_decode-0")
    ],
    count: Annotated[int, typer.Option("-n", min=1, help="How many entries, newest first.")] = 10,
) -> None:
    """Show entries that have not been handled yet."""
    from triptych_cli.commands import streams

    raise typer.Exit(streams.peek(stream, count))


@streams_app.command("lag")
def streams_lag() -> None:
    """Show every stream: entries, pending ones, consumers."""
    from triptych_cli.commands import streams

    raise typer.Exit(streams.lag())


@streams_app.command("dead")
def streams_dead(
    count: Annotated[int, typer.Option("-n", min=1, help="How many, newest first.")] = 10,
) -> None:
    """Show what no consumer could handle, with the reason."""
    from triptych_cli.commands import streams

    raise typer.Exit(streams.dead(count))
