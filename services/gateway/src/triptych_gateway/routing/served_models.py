"""ServedModels: names under which models are requested, and shares of their versions, as last read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from triptych_gateway.routing.models_file import ModelsFile, read_models_file


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
