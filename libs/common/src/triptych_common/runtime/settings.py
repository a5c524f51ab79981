"""Settings that every service has, read from `TRIPTYCH_*` and the command line, nowhere else."""

import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

import orjson
from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from triptych_common import release
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.ids import Name
from triptych_common.protocol.names import StreamNames
from triptych_common.runtime.config_file import ConfigFileError, ConfigFileSource, names_of
from triptych_common.telemetry.exporters import GRPC_PACKAGE, OtlpProtocol, is_installed
from triptych_common.telemetry.trace_files import DEFAULT_MAX_AGE_S, DEFAULT_MAX_BYTES

_CREDENTIALS = re.compile(r"://[^/@\s\"]*@")  # of a URL
HIDDEN = "(hidden)"
DEFAULT = "default"


def effective_settings(settings: BaseSettings, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each setting: `name = value  # origin`.

    Args:
        sources: settings of each source, by its name; the first that has a setting wins.
    """
    lines = []
    for name, field in type(settings).model_fields.items():
        names = names_of(name, field)
        origin = next((source for source, found in sources.items() if not names.isdisjoint(found)), DEFAULT)
        value = getattr(settings, name)
        is_hidden = _is_secret(value, is_shown=field.repr)
        shown = HIDDEN if is_hidden else orjson.dumps(value, default=_plain).decode()
        shown = _CREDENTIALS.sub("://***@", shown)
        lines.append(f"{name} = {shown}  # {origin}")
    return "\n".join(lines)


def _is_secret(value: Any, *, is_shown: bool) -> bool:
    return value is not None and (not is_shown or _has_secret(value))


def _has_secret(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_has_secret, value))
    return isinstance(value, SecretStr)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump is not None else str(value)


INVALID_SETTINGS_EXIT_CODE = 2


class RunDirError(TriptychError):
    """The run directory is not ours alone, so sockets and shared memory in it would not be safe."""


def default_run_dir() -> Path:
    """Return this user's directory on a tmpfs, or in the temporary directory."""
    shared_memory = Path("/dev/shm")
    base = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"triptych-{os.getuid()}"


def default_traces_dir(run_dir: Path) -> Path:
    """Return the folder of traces: in `run_dir`, or on disk if that is the default one in memory."""
    return (default_state_dir() / run_dir.name if run_dir == default_run_dir() else run_dir) / "traces"


def default_state_dir() -> Path:
    """Return this user's directory on disk, for data that may grow and is read afterwards."""
    return Path.home() / ".local" / "state" / "triptych"


def ensure_run_dir(path: Path, name: str = "run directory") -> None:
    """Create `path` as 0700, or check that it is.

    Args:
        name: name of the directory in errors.

    Raises:
        RunDirError: not a directory, owned by another user, or open to group or world.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise RunDirError(f"{name} {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise RunDirError(f"{name} {path} is not a directory")
    if info.st_uid != os.getuid():
        raise RunDirError(f"{name} {path} belongs to user {info.st_uid}, not to {os.getuid()}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise RunDirError(f"{name} {path} is open to other users; make it so: chmod 700 {path}")


def machine_name() -> str:
    return re.sub(r"[^A-Za-z0-9._:/@-]", "-", socket.gethostname())[:200] or "unnamed"


class ServiceSettings(BaseSettings):
    """Settings of every service; a service adds its own fields in a subclass.

    Each field is `TRIPTYCH_<NAME>` in the environment and `--<name-in-kebab-case>` on the command line,
    which wins; a file (`config_file`) comes last. Use `load()` in a `__main__`; build it directly, with
    keywords, in tests.
    """

    config_section: ClassVar[str] = "common"
    """Section of the settings file for the fields of this class; a subclass's own section overrides it."""
    exports_spans: ClassVar[bool] = True

    model_config = SettingsConfigDict(
        env_prefix="TRIPTYCH_",
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    config: Path | None = None
    """YAML file of settings for all services; environment and command line override it. Not set: none."""
    print_config: bool = False
    """Print all settings and where each comes from, then exit; meant for the command line."""
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    """URL of Redis: `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://`."""
    deployment: str = "default"
    """Prefix of every name in Redis: deployments on one Redis do not see each other. Letters, digits, `._-`,
    100 at most."""
    run_dir: Path = Field(default_factory=default_run_dir)
    """Folder of sockets and shared memory; made with mode 0700, and refused if others can read it. Not set:
    `/dev/shm/triptych-{uid}`, or the temporary directory where there is no `/dev/shm`."""
    store_socket: Path = Field(
        default_factory=lambda data: data.get("run_dir", default_run_dir()) / "store.sock"
    )
    """Unix socket of the host's cache_store. Not set: `store.sock` in `run_dir`."""
    instance: Name = "default"
    """Name of this instance, stable over restarts and unique in the deployment; `{hostname}` in it is
    replaced by the host's name."""
    host_name: Name = Field(default_factory=machine_name)
    """Name of this machine in the registry. Not set: its host name."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log lines that are written, in upper or lower case; lines are JSON unless stderr is a
    terminal."""
    otlp_endpoint: str | None = Field(
        default=None,
        validation_alias=AliasChoices(
            "otlp_endpoint", "TRIPTYCH_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    )
    """Base URL of an OTLP collector for spans; `OTEL_EXPORTER_OTLP_ENDPOINT` means the same. Not set: spans
    are written to files in `traces_dir`."""
    otlp_protocol: OtlpProtocol = Field(
        default="http/protobuf",
        validation_alias=AliasChoices(
            "otlp_protocol", "TRIPTYCH_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        ),
    )
    """Protocol of the OTLP collector; `OTEL_EXPORTER_OTLP_PROTOCOL` means the same."""
    traces_dir: Path = Field(
        default_factory=lambda data: default_traces_dir(data.get("run_dir", default_run_dir()))
    )
    """Folder of trace files, used without a collector. Not set: `traces` in `run_dir`, or, where `run_dir` is
    the default one, `~/.local/state/triptych/triptych-{uid}/traces`."""
    traces_max_bytes: int = Field(default=DEFAULT_MAX_BYTES, ge=0)
    """Bytes of trace files per process, newest spans kept; ended processes of the service keep as much again,
    in 64 files at most. 0: no files."""
    traces_max_age_s: int = Field(default=DEFAULT_MAX_AGE_S, ge=0)
    """Seconds after which spans are dropped from trace files; they stay for at least half of it if
    `traces_max_bytes` allows. 0: never."""
    drain_timeout_s: float = Field(default=15.0, ge=0)
    """Seconds to finish running work after SIGINT or SIGTERM, less than what the process is given to end; the
    rest is handed back or cut off. A second signal ends the process at once."""

    @field_validator("redis_url")
    @classmethod
    def _usable_address(cls, value: str) -> str:
        from triptych_common.redis_client.address import RedisAddress  # noqa: PLC0415 - the store needs no Redis

        RedisAddress.parse(value)
        return value

    @field_validator("instance", mode="before")
    @classmethod
    def _with_hostname(cls, value: Any) -> Any:
        """Replace `{hostname}`: a container's replicas share their environment, not their host name."""
        return value.replace("{hostname}", socket.gethostname()) if isinstance(value, str) else value

    @field_validator("deployment")
    @classmethod
    def _valid_deployment(cls, value: str) -> str:
        StreamNames(value)
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    def model_post_init(self, context: Any) -> None:
        """Refuse a collector's protocol whose package is not installed."""
        super().model_post_init(context)
        if self.exports_spans and self.otlp_endpoint is not None and not is_installed(self.otlp_protocol):
            raise ValueError(f"otlp_protocol {self.otlp_protocol} needs the package {GRPC_PACKAGE}")

    @property
    def names(self) -> StreamNames:
        return StreamNames(self.deployment)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Return settings from the environment and `argv` (None: the process's own); make the run directory.

        On invalid settings: one line per fault on stderr, exit code 2. With `print_config` they are printed,
        and the process ends with 0; with `--version` the release is.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        if "--version" in arguments:
            sys.stdout.write(f"triptych {release()}\n")
            raise SystemExit(0)
        try:
            settings = cls(_cli_parse_args=arguments)
            if settings.print_config:
                sys.stdout.write(settings._effective(arguments) + "\n")
                raise SystemExit(0)
            ensure_run_dir(settings.run_dir)
        except ValidationError as error:
            _refuse(_explain(error))
        except (SettingsError, ConfigFileError, RunDirError) as error:
            _refuse(f"  {error}")
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources that count, the first one most."""
        return init_settings, env_settings, cls._file_source()

    @classmethod
    def _file_source(cls) -> ConfigFileSource:
        classes = [each for each in reversed(cls.__mro__) if issubclass(each, ServiceSettings)]
        return ConfigFileSource(cls, {each.config_section: each for each in classes})

    def _effective(self, arguments: Sequence[str]) -> str:
        sources: dict[str, dict[str, Any]] = {
            "command line": CliSettingsSource(type(self), cli_parse_args=list(arguments))(),
            "environment": EnvSettingsSource(type(self))(),
        }
        if self.config is not None:
            sources[str(self.config)] = self._file_source().read(self.config)
        return effective_settings(self, sources)


def _explain(error: ValidationError) -> str:
    """Describe each fault in one line, without the values, which may be secret."""
    return "\n".join(
        f"  {'.'.join(map(str, fault['loc'])) or 'settings'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False, include_context=False)
        if fault["type"] != "default_factory_not_called"  # only follows from another fault
    )


def _refuse(faults: str) -> NoReturn:
    sys.stderr.write(f"invalid settings:\n{faults}\n")
    raise SystemExit(INVALID_SETTINGS_EXIT_CODE)
