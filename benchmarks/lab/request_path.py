"""Count the functions and files of the gateway that a chat request with an image can pass.

    python benchmarks/lab/request_path.py [--list] [ENTRY]

The script reads the source alone. It starts at ENTRY, a method, and follows calls, and functions that are
handed on as arguments. A receiver's type comes from annotations and constructors; a call whose receiver has
none is left out.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "services/gateway/src/triptych_gateway"
ENTRY = "ChatExchange.run"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    """A class of the package: its methods, its bases, and the type names of its attributes."""

    file: Path
    bases: list[str]
    methods: dict[str, Function] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


def type_name(annotation: ast.expr | None, known: set[str]) -> str | None:
    """Return the only class of the package that an annotation names."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    found = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name) and each.id in known}
    return found.pop() if len(found) == 1 else None


class Package:
    """All classes and functions of the package by name; names are unique enough to go without modules."""

    def __init__(self, root: Path) -> None:
        """Read every module below `root`."""
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, tuple[Path, Function]] = {}
        self.names: dict[Path, set[str]] = {}  # those of the package that a file defines or imports
        self.num_lines = 0
        trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
        for path, tree in trees.items():
            self.num_lines += len(path.read_text().splitlines())
            self.names[path] = {
                each.name
                for node in tree.body
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name)
                for each in node.names
            } | {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    bases = [
                        each.id
                        for base in node.bases
                        for each in ast.walk(base)
                        if isinstance(each, ast.Name)
                    ]
                    self.classes[node.name] = Class(path, bases)
                elif isinstance(node, Function):
                    name = f"{path}:{node.name}" if node.name.startswith("_") else node.name
                    self.functions[name] = path, node
        known = set(self.classes)
        for tree in [*trees.values()] * 2:  # an attribute of an attribute has its type at the second time
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._read_class(node, known)

    def _read_class(self, node: ast.ClassDef, known: set[str]) -> None:
        own = self.classes[node.name]
        for each in node.body:
            if isinstance(each, Function):
                own.methods[each.name] = each
                own.types.update(self._assigned(each, known))
            elif (
                isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and (found := type_name(each.annotation, known))
            ):
                own.types[each.target.id] = found

    def _assigned(self, function: Function, known: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the attributes of `self` that are parameters or new objects, with their types."""
        types = parameter_types(function, known)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target, value in pairs(node.targets[0], node.value):
                    if isinstance(target, ast.Attribute) and (found := self.type_of(value, types)):
                        yield target.attr, found
        if function.returns and (found := type_name(function.returns, known)):
            yield function.name, found  # a property, or the result of a method

    def type_of(self, value: ast.expr, types: dict[str, str]) -> str | None:
        """Return the class of an expression, if annotations or a constructor say it."""
        if isinstance(value, ast.Await):
            return self.type_of(value.value, types)
        if isinstance(value, ast.Name):
            return types.get(value.id)
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Name):
                if value.func.id in self.classes:
                    return value.func.id
                found = self.functions.get(value.func.id)
                return type_name(found[1].returns, set(self.classes)) if found else None
            return self.type_of(value.func, types)
        if isinstance(value, ast.Attribute):
            owner = self.type_of(value.value, types)
            while owner in self.classes:
                if value.attr in self.classes[owner].types:
                    return self.classes[owner].types[value.attr]
                owner = next((base for base in self.classes[owner].bases if base in self.classes), None)
        return None

    def method(self, owner: str | None, name: str) -> str | None:
        """Return `Class.method` for the class that defines `name` for instances of `owner`."""
        while owner in self.classes:
            if name in self.classes[owner].methods:
                return f"{owner}.{name}"
            owner = next((base for base in self.classes[owner].bases if base in self.classes), None)
        return None


def parameter_types(function: Function, known: set[str]) -> dict[str, str]:
    """Return the types of a function's parameters that are classes of the package."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {each.arg: found for each in arguments if (found := type_name(each.annotation, known))}


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with their values, also of `a, b = x, y`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each in zip(target.elts, value.elts, strict=True):
            yield from pairs(*each)
    else:
        yield target, value


def callees(package: Package, file: Path, owner: str | None, function: Function) -> Iterator[str]:
    """Yield the functions and methods that `function` names."""
    types = parameter_types(function, set(package.classes))
    if owner is not None:
        types["self"] = types["cls"] = owner
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target, value in pairs(node.targets[0], node.value):
                if isinstance(target, ast.Name) and (found := package.type_of(value, types)):
                    types[target.id] = found
        elif (
            isinstance(node, ast.withitem)
            and isinstance(node.optional_vars, ast.Name)
            and (found := package.type_of(node.context_expr, types))
        ):
            types[node.optional_vars.id] = found
    named = [
        each
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for each in (node.func, *node.args, *(keyword.value for keyword in node.keywords))
    ]
    for node in named:
        if isinstance(node, ast.Name) and node.id in package.names[file]:
            private = f"{file}:{node.id}"
            if private in package.functions:
                yield private
            elif node.id in package.functions:
                yield node.id
            elif found := package.method(node.id, "__init__"):
                yield found
        elif isinstance(node, ast.Attribute):
            receiver = package.type_of(node.value, types)
            known = package.names[file] & set(package.classes)
            if isinstance(node.value, ast.Name) and node.value.id in known:
                receiver = node.value.id
            if found := package.method(receiver, node.attr):
                yield found


def walk(package: Package, entry: str) -> dict[str, Path]:
    """Return the functions reached from `entry`, each with its file."""
    subclass = entry.partition(".")[0]
    found: dict[str, Path] = {}
    waiting = [package.method(*entry.split(".")) or entry] if "." in entry else [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        owner, _, method = name.rpartition(".")
        if ":" in name or not owner:
            file, function = package.functions[name]
            found[name] = file
            waiting += callees(package, file, None, function)
        else:
            found[name] = package.classes[owner].file
            is_entry = owner in package.classes.get(subclass, Class(PACKAGE, [])).bases
            waiting += callees(
                package, found[name], subclass if is_entry else owner, package.classes[owner].methods[method]
            )
    return found


def main() -> None:
    arguments = [each for each in sys.argv[1:] if each != "--list"]
    package = Package(PACKAGE)
    found = walk(package, arguments[0] if arguments else ENTRY)
    num_files = len(set(found.values()))
    print(f"{len(found)} functions in {num_files} files; the package has {package.num_lines} lines")
    if "--list" in sys.argv:
        for file, number in sorted(Counter(found.values()).items()):
            names = sorted(name.rpartition(":")[2] for name, each in found.items() if each == file)
            print(f"{number:4} {file.relative_to(PACKAGE)}: {', '.join(names)}")


if __name__ == "__main__":
    main()
