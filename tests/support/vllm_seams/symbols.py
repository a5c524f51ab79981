"""Definitions in a source tree of vLLM, read from its syntax; nothing of it is imported."""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_HOPS = 12  # imports from one module by another


@dataclass(frozen=True)
class Definition:
    """A name's definition: module, class, function, or another value with what is known of its type.

    `node` is None for a module, and for a value whose type is not written down.
    """

    module: "Module"
    node: ast.AST | None
    is_module: bool = False

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, FUNCTIONS)


class Module:
    """One module; `names` are its own and imported ones, also below `if` and `try`."""

    def __init__(self, tree: "Tree", name: str, path: Path) -> None:
        self.tree, self.name = tree, name
        self.is_package = path.name == "__init__.py"
        self.syntax = ast.parse(path.read_bytes())
        self.names: dict[str, ast.AST] = {}
        for node in _flat(self.syntax.body):
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                self.names[node.name] = node
            elif isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    self.names.setdefault(alias.asname or alias.name.partition(".")[0], node)
            else:
                self.names |= dict(assigned(node))

    @functools.cached_property
    def owners(self) -> Mapping[ast.AST, str]:
        """Name of the class that each of its methods is in."""
        classes = (node for node in ast.walk(self.syntax) if isinstance(node, ast.ClassDef))
        return {method: node.name for node in classes for method in node.body}

    def find(self, name: str, hops: int = MAX_HOPS) -> Definition | None:
        """Definition of a name, wherever in vLLM it is; a value without a node for one from elsewhere."""
        node = self.names.get(name)
        if node is None:
            submodule = self.tree.module(f"{self.name}.{name}") if self.is_package else None
            return Definition(submodule, None, is_module=True) if submodule else self._lazy(name)
        if isinstance(node, ast.Import):
            found = self.tree.module(name) if any(each.name == name for each in node.names) else None
            return Definition(found, None, is_module=True) if found else Definition(self, None)
        if isinstance(node, ast.ImportFrom):
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            origin = self._absolute(node)
            if not origin.startswith("vllm"):
                return Definition(self, None)
            submodule = self.tree.module(f"{origin}.{alias.name}")
            if submodule is not None:
                return Definition(submodule, None, is_module=True)
            source = self.tree.module(origin)
            return source.find(alias.name, hops - 1) if source is not None and hops else None
        return Definition(self, node)

    def _lazy(self, name: str) -> Definition | None:
        """A value of a module that answers for any name (`__getattr__`)."""
        if "__getattr__" not in self.names:
            return None
        text = ast.unparse(self.syntax)
        return Definition(self, None) if f"'{name}'" in text or f"{name}:" in text else None

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


class Tree:
    """All modules below a folder `vllm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self.folder.joinpath(*name.split(".")[1:])
            paths = (path / "__init__.py", path.with_suffix(".py"))
            found = (
                next((each for each in paths if each.is_file()), None) if name.startswith("vllm") else None
            )
            self._modules[name] = None if found is None else Module(self, name, found)
        return self._modules[name]

    def find(self, dotted: str) -> Definition | None:
        """Definition of a dotted name: module, then its attributes."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:end]))
            if module is None:
                continue
            found: Definition | None = Definition(module, None, is_module=True)
            for part in parts[end:]:
                found = None if found is None else self.attribute(found, part)
            return found
        return None

    def attribute(self, of: Definition, name: str) -> Definition | None:
        """Definition of an attribute; None if there is none. Of a value: of an instance of its type."""
        if of.is_module:
            return of.module.find(name)
        if not isinstance(of.node, ast.ClassDef):
            return Definition(of.module, None)
        for each in self.bases(of):
            if each.node is None:
                return Definition(each.module, None)  # from outside: anything
            attributes = attributes_of(each.node)
            if name in attributes:
                return Definition(each.module, attributes[name])
        return None

    def bases(self, of: Definition) -> Iterator[Definition]:
        """The class and its bases; one without a node stands for a base from outside vLLM."""
        seen: set[int] = set()
        queue = [of]
        while queue:
            each = queue.pop(0)
            if id(each.node) in seen:
                continue
            seen.add(id(each.node))
            yield each
            if isinstance(each.node, ast.ClassDef):
                queue += [self._base(each.module, base) for base in each.node.bases if not _is_plain(base)]

    def _base(self, module: Module, base: ast.expr) -> Definition:
        if isinstance(base, ast.Subscript):
            base = base.value
        found = self.find_in(module, ast.unparse(base))
        return found if found is not None and found.is_class else Definition(module, None)

    def find_in(self, module: Module, dotted: str) -> Definition | None:
        """Definition of a dotted name as `module` writes it."""
        first, *rest = dotted.split(".")
        found = module.find(first)
        for part in rest:
            found = None if found is None else self.attribute(found, part)
        return found

    def type_of(self, value: Definition) -> Definition | None:
        """Class of a value: of its annotation, or of the class that is called for it; None if not known."""
        node = value.node
        if value.is_module or value.is_class:
            return value
        if isinstance(node, FUNCTIONS):
            if not any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
                return value
            node = node.returns
        for name in _class_names(node):
            found = self.find_in(value.module, name)
            if found is not None and found.is_class:
                return found
        return None

    def imported_by(self, function: Definition) -> Definition | None:
        """Module or name of vLLM that a function of ours imports and returns."""
        if not isinstance(function.node, FUNCTIONS):
            return None
        *before, last = function.node.body
        returned = ast.unparse(last.value) if isinstance(last, ast.Return) and last.value is not None else ""
        for node in before:
            for each in node.names if isinstance(node, ast.ImportFrom) else ():
                if returned == (each.asname or each.name):
                    return self.find(f"{node.module}.{each.name}")  # type: ignore[attr-defined]
        return None

    def element_of(self, value: Definition) -> Definition | None:
        """Class of the elements of a list, or of the values of a dict, as annotated."""
        node = value.node
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if not isinstance(node, ast.Subscript):
            return None
        inner = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
        return self.type_of(Definition(value.module, inner))


@functools.cache
def attributes_of(node: ast.ClassDef) -> Mapping[str, ast.AST]:
    """Attributes that a class's own body defines, and those that its methods assign to `self`."""
    found: dict[str, ast.AST] = {}
    for method in _flat(node.body):
        if not isinstance(method, FUNCTIONS):
            continue
        parameters = {
            each.arg: each.annotation
            for each in (*method.args.args, *method.args.kwonlyargs)
            if each.annotation is not None
        }
        for statement in ast.walk(method):
            for name, value in assigned(statement, of="self"):
                is_parameter = isinstance(value, ast.Name) and value.id in parameters
                typed = parameters[value.id] if isinstance(value, ast.Name) and is_parameter else value
                if name not in found or isinstance(found[name], ast.Constant):
                    found[name] = typed
    for statement in _flat(node.body):
        if isinstance(statement, (ast.ClassDef, *FUNCTIONS)):
            found[statement.name] = statement
        else:
            found |= dict(assigned(statement))
    return found


def assigned(node: ast.AST, of: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Names that a statement assigns, or attributes of the name `of`, with annotation or value."""
    targets: list[ast.expr]
    if isinstance(node, ast.AnnAssign):
        targets, value = [node.target], node.annotation
    elif isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AugAssign):
        targets, value = [node.target], node.value
    else:
        return
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            is_own = not isinstance(target, ast.Tuple)
            if isinstance(each, ast.Name) and not of:
                yield each.id, value if is_own else ast.Constant(None)
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == of:
                yield each.attr, value if is_own else ast.Constant(None)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body with those below `if`, `try` and `with`."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _flat(getattr(node, name, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _flat(handler.body)


def _class_names(node: ast.AST | None) -> Iterator[str]:
    """Names of classes in an annotation, or in a call that makes an instance."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.BinOp):
        yield from _class_names(node.left)
        yield from _class_names(node.right)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(
        ("Optional", "type", "ClassVar")
    ):
        yield from _class_names(node.slice)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)


def _is_plain(base: ast.expr) -> bool:
    """True for a base class without attributes of its own."""
    name = ast.unparse(base).rpartition(".")[2].partition("[")[0]
    return name in {"ABC", "Protocol", "Generic", "object"}
