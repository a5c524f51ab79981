"""File of routing profiles (YAML; `docs/guide/routing.md`).

    default:                       # what no stage says otherwise
      weights: {prefix: 2, queue: 3}
      filters: [suspect, full]
      full_above: 0.95
      picker: best
    prefill:
      weights: {tokens: 2}

A file without `default` changes the built-in profiles; one with it replaces them.
"""

from pathlib import Path

from pydantic import ValidationError

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.yaml_file import YamlFileError, read_yaml_file
from triptych_gateway.routing.scheduling.profiles import BUILT_IN, RoutingProfiles, StageProfile

MAX_FILE_BYTES = 1 << 16
STAGES = tuple(name for name in RoutingProfiles.model_fields if name != "default")


class RoutingFileError(TriptychError):
    """The file of routing profiles cannot be used as it is."""


def read_profiles(path: Path | None) -> RoutingProfiles:
    """Return the profiles of the file, or the built-in ones.

    Raises:
        RoutingFileError: it is missing or malformed, or has an unknown field or value.
    """
    if path is None:
        return BUILT_IN
    try:
        content = read_yaml_file(path, f"the routing file {path}", max_bytes=MAX_FILE_BYTES)
    except YamlFileError as error:
        raise RoutingFileError(str(error)) from None
    if not isinstance(content, dict):
        raise RoutingFileError(f"the routing file {path} must hold default, {', '.join(STAGES)}, or some")
    try:
        said = RoutingProfiles.model_validate({"default": {}, **content})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        named = ".".join(map(str, fault["loc"]))
        raise RoutingFileError(f"the routing file {path}: {named}: {fault['msg']}"[:1000]) from None
    return said if "default" in content else _changed(said)


def _changed(said: RoutingProfiles) -> RoutingProfiles:
    changes: dict[str, StageProfile] = {
        stage: getattr(BUILT_IN, stage).changed_by(getattr(said, stage)) for stage in STAGES
    }
    return BUILT_IN.model_copy(update=changes)
