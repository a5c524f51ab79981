"""ServedModels: under which names models are asked for, and the shares of their versions, as last read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from triptych_gateway.routing.models_file import ModelsFile, read_models_file


class ServedModels:
    """One per gateway. What callers ask for is a name; what instances serve is a model, or an adapter."""

    def __init__(self, content: ModelsFile | None = None) -> None:
        self.content = content or ModelsFile()

    @classmethod
    def of_file(cls, path: Path | None) -> Self:
        """`path` None: there are no other names, and no shares.

        Raises:
            ModelsFileError: the file cannot be used.
        """
        return cls(None if path is None else read_models_file(path))

    def replace_content(self, content: ModelsFile) -> None:
        """From now on. Requests that have begun go on."""
        self.content = content

    def resolve(self, name: str) -> str:
        """The model that `name` stands for. An alias counts more than a model of the same name."""
        return self.content.aliases.get(name, name)

    def aliases_of(self, model: str) -> list[str]:
        return sorted(alias for alias, target in self.content.aliases.items() if target == model)

    def shares_of(self, model: str, parent: str | None) -> Mapping[str, int] | None:
        """Weights by version; an adapter's are those of its model, `parent`. None: none are set."""
        return self.content.shares.get(parent or model)

    def may_use(self, model: str, allows: Callable[[str], bool]) -> bool:
        """Whether a caller whose key `allows` names gets at `model`, under any name."""
        return self.permitted_name(model, "", allows) is not None

    def permitted_name(self, model: str, asked: str, allows: Callable[[str], bool]) -> str | None:
        """The name that permits a request for `model`: its own, or that which was asked for.

        `asked`: "" for a request that names none, which any alias permits. None: the key may not.
        """
        names = (model, asked) if asked else (model, *self.aliases_of(model))
        return next((name for name in names if name and allows(name)), None)
