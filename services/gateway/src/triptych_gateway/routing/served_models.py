"""Served models: their names and their versions' shares, from a YAML file that may change.

aliases:                     # name -> model or LoRA adapter
  gpt-4o: qwen-vl
shares:                      # model -> version -> weight
  qwen-vl: {"2": 90, "3": 10}
version_header: true         # callers may name a version themselves
session_header: X-Session-Id # what keeps a conversation at one version, instead of its first message
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.ids import Name
from triptych_common.runtime.yaml_file import YamlFileError, read_yaml_file
from triptych_gateway.errors import first_fault

MAX_WEIGHT = 1_000_000

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Weight = Annotated[int, Field(strict=True, ge=0, le=MAX_WEIGHT)]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,100}$")]
Shares = Annotated[dict[Name, Weight], Field(min_length=1)]


class ModelsFileError(TriptychError):
    """The file of models cannot be used as it is."""


class ModelsFile(BaseModel):
    """Content of the file; empty without one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aliases: dict[ModelName, ModelName] = Field(default_factory=dict)
    shares: dict[ModelName, Shares] = Field(default_factory=dict)
    version_header: Annotated[bool, Field(strict=True)] = False
    session_header: HeaderName = "X-Session-Id"

    @model_validator(mode="after")
    def _check_names(self) -> Self:  # noqa: N804 - pydantic calls it on the model
        for alias, model in self.aliases.items():
            if model in self.aliases:
                raise ValueError(f"aliases: {alias} leads to {model}, which is an alias itself")
        for model, shares in self.shares.items():
            if model in self.aliases:
                raise ValueError(f"shares: {model} is an alias")
            if not any(shares.values()):
                raise ValueError(f"shares: no version of {model} has a weight")
        return self


def read_models_file(path: Path) -> ModelsFile:
    """Read and check the content of `path`. Raises ModelsFileError: it is missing or malformed."""
    try:
        content = read_yaml_file(path, f"the file of models {path}")
    except YamlFileError as error:
        raise ModelsFileError(str(error)) from error.__cause__  # `ChangedFile` looks at it
    try:
        return ModelsFile.model_validate(content or {})
    except ValidationError as error:
        raise ModelsFileError(f"the file of models {path}: {first_fault(error)}") from None


class ServedModels:
    """Names of one gateway's models: callers request a name, instances serve a model or an adapter."""

    def __init__(self, content: ModelsFile | None = None) -> None:
        self.content = content or ModelsFile()

    @classmethod
    def of_file(cls, path: Path | None) -> Self:
        """Read the file; without a path there are no other names and no shares.

        Raises:
            ModelsFileError: the file cannot be used.
        """
        return cls(None if path is None else read_models_file(path))

    def replace_content(self, content: ModelsFile) -> None:
        """Replace the content from now on; requests that have begun go on."""
        self.content = content

    def resolve(self, name: str) -> str:
        """Return the model that `name` stands for. An alias overrides a model of the same name."""
        return self.content.aliases.get(name, name)

    def aliases_of(self, model: str) -> list[str]:
        return sorted(alias for alias, target in self.content.aliases.items() if target == model)

    def shares_of(self, model: str, parent: str | None) -> Mapping[str, int] | None:
        """Return weights by version, for an adapter those of its model `parent`, or None."""
        return self.content.shares.get(parent or model)

    def may_use(self, model: str, allows: Callable[[str], bool]) -> bool:
        """Return whether a caller, whose key permits the names that pass `allows`, may use `model`."""
        return self.permitted_name(model, "", allows) is not None

    def permitted_name(self, model: str, asked: str, allows: Callable[[str], bool]) -> str | None:
        """Return the name that permits a request for `model`: its own, or the requested one, or None.

        `asked` is "" for a request without a name, which any alias permits.
        """
        names = (model, asked) if asked else (model, *self.aliases_of(model))
        return next((name for name in names if name and allows(name)), None)
