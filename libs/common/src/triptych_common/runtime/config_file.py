"""One YAML file of settings, for all services; the environment and the command line override it.

    common:                 # of every service
      redis_url: redis://redis:6379/0
    media:                  # of all that handle media: not the cache_store
      image_formats: [PNG, JPEG]
    gateway:                # of one service; wins over the others
      max_requests_in_flight: 512
    encoder: {...}
    prefill_decode: {...}
    cache_store: {...}

Names and meanings are those of the settings, without `TRIPTYCH_`.
"""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.yaml_file import YamlFileError, parse_yaml_file

SECTIONS = ("common", "media", "gateway", "encoder", "prefill_decode", "cache_store")
NOT_IN_FILES = frozenset({"config", "print_config"})


class ConfigFileError(TriptychError):
    """The settings file cannot be used as it is."""


class ConfigFileSource(PydanticBaseSettingsSource):
    """Source of the file that earlier sources name as `config`; empty if they name none.

    Values are never part of an error: they may be secret.
    """

    def __init__(self, settings_cls: type[BaseSettings], sections: Mapping[str, type[BaseSettings]]) -> None:
        """Store the sections that count here, the last one most; each holds fields of its class."""
        super().__init__(settings_cls)
        self._sections = sections

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        found = self.read(Path(path))
        # Another source may have it by another of its names, which pydantic would look at later.
        return {name: value for name, value in found.items() if not self._is_known(name)}

    def read(self, path: Path) -> dict[str, Any]:
        """Return the settings for this service from `path`.

        Raises:
            ConfigFileError: it cannot be read, has no such form, or names a setting that there is not.
        """
        there, found = _read_sections(path), dict[str, Any]()
        for section, settings_cls in self._sections.items():
            values = there.get(section, {})
            unknown = sorted(values.keys() - (settings_cls.model_fields.keys() - NOT_IN_FILES))
            if unknown:
                raise ConfigFileError(f"{path}: {section} has no setting {', '.join(unknown)}"[:1000])
            found |= values
        return found

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Unused: `__call__` returns all fields."""
        raise NotImplementedError

    def _is_known(self, name: str) -> bool:
        return not names_of(name, self.settings_cls.model_fields[name]).isdisjoint(self.current_state)


def names_of(name: str, field: FieldInfo) -> frozenset[str]:
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return frozenset({name, *(each for each in choices if isinstance(each, str))})


def _read_sections(path: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        with path.open("rb") as file:
            if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigFileError(f"{path} can be written by other users; make it so: chmod go-w {path}")
            content = parse_yaml_file(file, str(path))
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from error
    except YamlFileError as error:
        raise ConfigFileError(str(error)) from None
    sections = {} if content is None else content
    if not isinstance(sections, dict) or not sections.keys() <= set(SECTIONS):
        raise ConfigFileError(f"{path} may have these sections, and no others: {', '.join(SECTIONS)}")
    for name, section in sections.items():
        if not isinstance(section, dict | None) or not all(isinstance(key, str) for key in section or {}):
            raise ConfigFileError(f"{path}: {name} must hold names and values of settings")
    return {name: section or {} for name, section in sections.items()}
