"""Uses of vLLM in our code: its syntax is walked with the types that are known of vLLM's objects.

A chain such as `scheduler.kv_cache_manager.block_pool.null_block` begins at an imported name, at a parameter
that is annotated, or at a name that means the same object all over our code (`ROLES`); it is followed as far
as vLLM writes types down.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.support.vllm_seams.symbols import FUNCTIONS, Definition, Function, Module, Tree, attributes_of

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "vllm_config": "vllm.config.VllmConfig",
        "model_config": "vllm.config.ModelConfig",
        "scheduler_config": "vllm.config.SchedulerConfig",
        "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
        "request": "vllm.v1.request.Request",
        "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
        "model_runner_output": "vllm.v1.outputs.ModelRunnerOutput",
        "runner_output": "vllm.v1.outputs.ModelRunnerOutput",
        "engine": "vllm.v1.engine.async_llm.AsyncLLM",
        "renderer": "vllm.renderers.base.BaseRenderer",
        "feature": "vllm.multimodal.inputs.MultiModalFeatureSpec",
    }
)
"""Names of parameters and variables that mean one class of vLLM's wherever our code types them `Any`."""

OTHER_MEANINGS: Mapping[str, frozenset[str]] = MappingProxyType({"replaying.py": frozenset({"request"})})
"""Names of `ROLES` that mean something else in a file, by its name."""

BASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DisaggEncodeGPURunnerWrapper": (
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
            "vllm.v1.worker.mm_encoder_model_runner.MMEncoderModelRunner",
        ),
        "DisaggPrefillDecodeGPURunnerWrapper": (
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        ),
        "_BoundedLoader": ("vllm.multimodal.video.VideoLoader",),
    }
)
"""vLLM's classes in front of which a mixin is put when it runs."""


SEAMS = "triptych_vllm_connector.seams"


@dataclass
class Uses:
    """Faults in one version, and every function of vLLM that our code calls, wraps or overrides."""

    faults: list[str] = field(default_factory=list)
    assignments: list[str] = field(default_factory=list)  # to modules and classes of vLLM's
    functions: dict[str, Definition] = field(default_factory=dict)
    num_checked: int = 0


@dataclass(frozen=True)
class OurClass:
    node: ast.ClassDef
    bases: tuple[str, ...]  # as written


def find_uses(tree: Tree, root: Path, release: str) -> Uses:
    """Check all uses in the checkout `root` against the definitions of one release."""
    uses = Uses()
    seams = root / "libs/vllm_connector/src" / SEAMS.replace(".", "/")
    adapter = f"vllm_{'_'.join(release.split('.')[:2])}"
    if not (seams / f"{adapter}.py").exists():  # a release that has none yet
        adapter = max(path.stem for path in seams.glob("vllm_*.py"))
    module = Module(tree, f"{SEAMS}.{adapter}", seams / f"{adapter}.py")
    files = {name: path for name, path in our_files(root).items() if not _is_other_adapter(path, adapter)}
    for dotted in (*ROLES.values(), *(each for bases in BASES.values() for each in bases)):
        if tree.find(dotted) is None:
            uses.faults.append(f"{dotted} does not exist")
    parsed = {name: ast.parse(path.read_bytes()) for name, path in files.items()}
    classes = {
        node.name: OurClass(node, tuple(ast.unparse(base) for base in node.bases))
        for syntax in parsed.values()
        for node in ast.walk(syntax)
        if isinstance(node, ast.ClassDef)
    }
    imports = {name: _imports(tree, module, name, syntax, uses) for name, syntax in parsed.items()}
    bases = _vllm_bases(tree, parsed, classes, imports)
    for name, syntax in parsed.items():
        _Walker(tree, name, imports[name], classes, bases, uses).visit(syntax)
    return uses


def _is_other_adapter(path: Path, adapter: str) -> bool:
    return path.stem.startswith("vllm_0_") and path.stem != adapter


def _imports(tree: Tree, adapter: Module, file: str, syntax: ast.Module, uses: Uses) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in ast.walk(syntax):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None and _is_vllm(node.module):
            names = [(each.asname or each.name, f"{node.module}.{each.name}") for each in node.names]
        elif isinstance(node, ast.Import):
            names = [(each.asname or each.name, each.name) for each in node.names if _is_vllm(each.name)]
        elif isinstance(node, ast.ImportFrom) and node.module == f"{SEAMS}.current":
            found |= {
                each.name: Definition(adapter, None, is_module=True)
                for each in node.names
                if each.name == "seam"
            }
        for local, dotted in names:
            uses.num_checked += 1
            definition = tree.find(dotted)
            if definition is None:
                line = getattr(node, "lineno", 0)
                uses.faults.append(f"{file}:{line}: {dotted} does not exist")
            else:
                found[local] = (
                    definition if local != "vllm" or dotted == "vllm" else tree.find("vllm") or definition
                )
    return found


def _is_vllm(module: str) -> bool:
    return module == "vllm" or module.startswith("vllm.")


def _vllm_bases(
    tree: Tree,
    parsed: Mapping[str, ast.Module],
    classes: Mapping[str, OurClass],
    imports: Mapping[str, Mapping[str, Definition]],
) -> dict[str, list[Definition]]:
    """vLLM's classes behind each class of ours: of its bases, or of a class that mixes it in."""
    where = {
        node.name: imports[name]
        for name, syntax in parsed.items()
        for node in ast.walk(syntax)
        if isinstance(node, ast.ClassDef)
    }

    def of(name: str, seen: frozenset[str] = frozenset()) -> list[Definition]:
        if name not in classes or name in seen:
            return []
        found = [each for dotted in BASES.get(name, ()) if (each := tree.find(dotted)) is not None]
        for base in classes[name].bases:
            if base in where[name]:
                found.append(where[name][base])
            found += of(base, seen | {name})
        return found

    direct = {name: of(name) for name in classes}
    for name, ours in classes.items():  # mixins: what stands behind them
        for base in ours.bases:
            if base in classes and not direct[base]:
                direct[base] = [each for each in direct[name] if each not in direct[base]]
    return {name: [each for each in found if each.is_class] for name, found in direct.items()}


class _Walker(ast.NodeVisitor):
    def __init__(
        self,
        tree: Tree,
        file: str,
        imports: Mapping[str, Definition],
        classes: Mapping[str, OurClass],
        bases: Mapping[str, list[Definition]],
        uses: Uses,
    ) -> None:
        self._tree, self._file, self._uses = tree, file, uses
        self._classes, self._bases = classes, bases
        self._scopes: list[dict[str, Definition | None]] = [dict(imports)]
        self._class: str | None = None
        self._tuples: dict[str, ast.Tuple] = {}  # by the variable they were assigned to last
        other = OTHER_MEANINGS.get(file.rpartition("/")[2], frozenset())
        self._roles = {
            name: found
            for name, dotted in ROLES.items()
            if name not in other and (found := tree.find(dotted)) is not None
        }

    # ---- scopes ----------------------------------------------------------------------------------
    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        for base in self._bases.get(node.name, []):
            for method in node.body:
                if isinstance(method, FUNCTIONS):
                    self._check_override(node.name, method, base)
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: Function) -> None:
        scope: dict[str, Definition | None] = {}
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            annotated = None if each.annotation is None else self._type_in(each.annotation)
            is_open = each.annotation is None or ast.unparse(each.annotation) in (
                "Any",
                "Any | None",
                "object",
            )
            if annotated is not None:
                scope[each.arg] = annotated
            elif each.arg in self._roles:
                scope[each.arg] = self._roles[each.arg] if is_open else None
            else:
                scope[each.arg] = None
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- ast's name

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                self._check_assignment(each)
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, node.value)]
            if isinstance(target, ast.Tuple):
                is_pair = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
                values = node.value.elts if is_pair and isinstance(node.value, ast.Tuple) else None
                pairs = [(each, values[index] if values else None) for index, each in enumerate(target.elts)]
            for each, value in pairs:
                if isinstance(each, ast.Name):
                    self._scopes[-1][each.id] = None if value is None else self._known(value)
                    if isinstance(value, ast.Tuple):
                        self._tuples[each.id] = value

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._scopes[-1][node.target.id] = self._type_in(node.annotation) or (
                self._known(node.value) if node.value is not None else None
            )

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind_element(node.target, node.iter)
        self.generic_visit(node)

    visit_AsyncFor = visit_For  # noqa: N815 -- ast's name

    def _visit_comprehension(self, node: ast.AST) -> None:
        self._scopes.append({})
        for each in node.generators:  # type: ignore[attr-defined]
            self._bind_element(each.target, each.iter)
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension  # noqa: N815

    def _bind_element(self, target: ast.expr, of: ast.expr) -> None:
        if isinstance(target, ast.Name):
            source = self._known(of, keep_value=True)
            self._scopes[-1][target.id] = None if source is None else self._tree.element_of(source)
        elif isinstance(target, ast.Tuple):
            self._scopes[-1] |= {each.id: None for each in target.elts if isinstance(each, ast.Name)}

    # ---- types -----------------------------------------------------------------------------------
    def _lookup(self, name: str) -> Definition | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def _type_in(self, annotation: ast.expr) -> Definition | None:
        """vLLM's class that an annotation of ours names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(annotation, ast.BinOp):
            return self._type_in(annotation.left) or self._type_in(annotation.right)
        found = self._known(annotation) if isinstance(annotation, ast.Name | ast.Attribute) else None
        return found if found is not None and found.is_class else None

    def _known(self, node: ast.expr, *, keep_value: bool = False) -> Definition | None:
        """Definition that an expression leads to; of a value, that of its class unless `keep_value`."""
        if isinstance(node, ast.Name):
            return self._lookup(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._known(node.value)
            found = None if owner is None else self._tree.attribute(owner, node.attr)
            if found is None and owner is None and self._is_own_self(node.value):
                found = self._of_self(node.attr)
            return found if found is None or keep_value else self._tree.type_of(found)
        if isinstance(node, ast.Call):
            if (
                isinstance(node.func, ast.Name)
                and node.func.id in ("list", "sorted", "reversed")
                and node.args
            ):
                return self._known(node.args[0], keep_value=keep_value)
            called = self._known(node.func)
            if called is None or called.is_class or called.is_module:
                return called
            if found := self._tree.imported_by(called):
                return found
            if isinstance(called.node, FUNCTIONS) and called.node.returns is not None:
                value = Definition(called.module, called.node.returns)
                return value if keep_value else self._tree.type_of(value)
            return None
        if isinstance(node, ast.Subscript):
            source = self._known(node.value, keep_value=True)
            return None if source is None else self._tree.element_of(source)
        if isinstance(node, ast.Await):
            return self._known(node.value, keep_value=keep_value)
        return None

    def _is_own_self(self, node: ast.expr) -> bool:
        is_super = isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
        return self._class is not None and (is_super or (isinstance(node, ast.Name) and node.id == "self"))

    def _of_self(self, name: str) -> Definition | None:
        """Attribute of `self` that one of vLLM's classes behind our class has."""
        for base in self._bases.get(self._class or "", []):
            found = self._tree.attribute(base, name)
            if found is not None:
                return found
        return None

    def _is_ours(self, name: str, of: str | None) -> bool:
        """True if our class, or a base of it that is ours, defines the attribute."""
        if of is None or of not in self._classes:
            return False
        ours = self._classes[of]
        if name in attributes_of(ours.node) or _is_set_elsewhere(name, ours.node):
            return True
        mixed_by = [each for each, other in self._classes.items() if of in other.bases]
        return any(self._is_ours(name, base) for base in ours.bases) or any(
            name in attributes_of(self._classes[each].node) for each in mixed_by
        )

    # ---- checks ----------------------------------------------------------------------------------
    def _check_assignment(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Attribute):
            return
        owner = self._known(target.value, keep_value=True)
        is_part = (
            owner is not None and (owner.is_module or owner.is_class) and self._leads_to_class(target.value)
        )
        if is_part and "triptych" not in target.attr:
            self._uses.assignments.append(f"{self._file}:{target.lineno}: {ast.unparse(target)}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if "triptych" in node.attr or node.attr.startswith("__"):
            return
        if self._is_own_self(node.value):
            is_super = isinstance(node.value, ast.Call)
            bases = self._bases.get(self._class or "", [])
            own = [self._class] if not is_super else list(self._classes[self._class or ""].bases)
            if not bases or any(self._is_ours(node.attr, each) for each in own):
                return
            self._uses.num_checked += 1
            for base in bases:
                found = self._tree.attribute(base, node.attr)
                if found is not None:
                    self._note(found, node.attr)
                    return
            self._fault(node, f"self.{node.attr} is in none of {[_name(each) for each in bases]}")
            return
        owner = self._known(node.value)
        if owner is None or not (owner.is_class or owner.is_module):
            return
        self._uses.num_checked += 1
        found = self._tree.attribute(owner, node.attr)
        if found is None:
            self._fault(node, f"{_name(owner)} has no {node.attr}")
        else:
            self._note(found, node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        name = function.id if isinstance(function, ast.Name) else ""
        if name in ("replace", "require_names"):
            self._check_users(node)
        if name == "isinstance" and isinstance(node.args[0], ast.Name):
            self._scopes[-1][node.args[0].id] = self._type_in(node.args[1])  # narrowed
        called = self._known(function)
        if called is None or (isinstance(function, ast.Name) and function.id not in self._scopes[0]):
            return  # a variable may hold a method with or without its object
        bound = isinstance(function, ast.Attribute) and not self._leads_to_class(function.value)
        if called.is_class:
            found = self._tree.attribute(called, "__init__")
            if found is None or not found.is_function:
                self._check_fields(node, called)
                return
            called, bound = found, True
        if isinstance(called.node, FUNCTIONS):
            decorators = [ast.unparse(each) for each in called.node.decorator_list]
            is_method = bool(called.node.args.args) and called.node.args.args[0].arg in ("self", "cls")
            skip_first = is_method and (bound or "classmethod" in decorators)
            if any("overload" in each for each in decorators):
                return
            self._uses.num_checked += 1
            fault = _binds(node, called.node, skip_first=skip_first)
            if fault:
                self._fault(node, f"{ast.unparse(function)}: {fault}")

    def _leads_to_class(self, node: ast.expr) -> bool:
        """True if an attribute of the expression is one of a class or module, not of an instance."""
        if isinstance(node, ast.Name):
            found = self._scopes[0].get(node.id)
            return found is not None and all(node.id not in scope for scope in self._scopes[1:])
        if isinstance(node, ast.Call):
            return False
        found = self._known(node, keep_value=True)
        return found is not None and (found.is_class or found.is_module)

    def _check_fields(self, node: ast.Call, cls: Definition) -> None:
        """Keywords of a dataclass, pydantic model or msgspec struct."""
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._uses.num_checked += 1
                if self._tree.attribute(cls, keyword.arg) is None:
                    self._fault(node, f"{_name(cls)} has no field {keyword.arg}")

    def _check_users(self, node: ast.Call) -> None:
        """Check that vLLM's functions use the names that `seams.replacing` will look for when it runs."""
        given = [each.value for each in node.keywords if each.arg == "used_by"] or node.args[:1]
        texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
        names = {each for each in texts if isinstance(each, str)}
        users = given[0] if given else None
        if isinstance(users, ast.Name):
            users = self._tuples.get(users.id)
        for user in users.elts if isinstance(users, ast.Tuple) else ():
            found = self._known(user)
            if found is None or not found.is_function or found.node is None:
                continue
            self._uses.num_checked += 1
            missing = names - _names_in(found.node)
            if missing:
                self._fault(node, f"{ast.unparse(user)} does not use {sorted(missing)}")

    def _check_override(self, ours: str, method: Function, base: Definition) -> None:
        found = self._tree.attribute(base, method.name)
        if found is None or not isinstance(found.node, FUNCTIONS) or method.name == "__init__":
            return
        self._uses.num_checked += 1
        self._note(found, method.name)
        fault = _overrides(method, found.node)
        if fault:
            self._fault(method, f"{ours}.{method.name} over {_name(base)}: {fault}")

    def _note(self, found: Definition, name: str) -> None:
        if found.is_function:
            self._uses.functions[f"{found.module.name}:{_owner(found)}{name}"] = found

    def _fault(self, node: ast.AST, text: str) -> None:
        self._uses.faults.append(f"{self._file}:{node.lineno}: {text}")  # type: ignore[attr-defined]


def _is_set_elsewhere(name: str, node: ast.ClassDef) -> bool:
    """True for a class attribute that is only annotated, or a field."""
    return any(isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name for each in node.body)


def _name(definition: Definition) -> str:
    return definition.node.name if isinstance(definition.node, ast.ClassDef) else definition.module.name


def _names_in(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _owner(found: Definition) -> str:
    owners = found.module.owners
    return f"{owners[found.node]}." if found.node is not None and found.node in owners else ""


def _parameters(
    function: Function, *, skip_first: bool
) -> tuple[list[str], int, set[str], set[str], bool, bool]:
    """Positional names, how many of them are required, keyword-only ones and required ones, `*` and `**`."""
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    num_required = len(positional) - len(function.args.defaults)
    if skip_first:
        positional, num_required = positional[1:], num_required - 1
    keyword_only = {each.arg for each in function.args.kwonlyargs}
    required = {
        each.arg
        for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if default is None
    }
    return (
        positional,
        num_required,
        keyword_only,
        required,
        function.args.vararg is not None,
        function.args.kwarg is not None,
    )


def _binds(call: ast.Call, function: Function, *, skip_first: bool) -> str:
    """Reason why the call does not fit the function; "" if it does, as far as it is written out."""
    positional, num_required, keyword_only, required, has_args, has_kwargs = _parameters(
        function, skip_first=skip_first
    )
    keywords = {each.arg for each in call.keywords if each.arg is not None}
    unknown = keywords - set(positional) - keyword_only
    if unknown and not has_kwargs:
        return f"no parameter {sorted(unknown)}"
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    ):
        return ""
    if len(call.args) > len(positional) and not has_args:
        return f"{len(call.args)} positional arguments for {len(positional)}"
    missing = [each for each in positional[len(call.args) : num_required] if each not in keywords]
    missing += sorted(required - keywords)
    return f"missing {missing}" if missing else ""


def _overrides(ours: Function, base: Function) -> str:
    """Reason why calls that fit `base` need not fit `ours`; "" if they do."""
    is_static = any(ast.unparse(each) == "staticmethod" for each in base.decorator_list)
    names, _, only, _, has_args, has_kwargs = _parameters(base, skip_first=not is_static)
    our_names, our_required, our_only, our_required_only, our_args, our_kwargs = _parameters(
        ours, skip_first=not is_static
    )
    if isinstance(ours, ast.AsyncFunctionDef) != isinstance(base, ast.AsyncFunctionDef):
        return "one is a coroutine"
    for index, name in enumerate(names):
        if index < len(our_names):
            if our_names[index] != name:
                return f"parameter {index} is {our_names[index]}, in vLLM {name}"
        elif not our_args and name not in our_only:
            return f"does not take {name}"
        elif not (our_kwargs or name in our_only):
            return f"does not take {name} by its name"
    if len(our_names) > len(names) and our_required > len(names) and not has_args:
        return f"needs {our_names[len(names) : our_required]}"
    missing = only - our_only - set(our_names)
    if missing and not our_kwargs:
        return f"does not take {sorted(missing)}"
    if our_required_only - only - set(names):
        return f"needs {sorted(our_required_only - only)}"
    if has_kwargs and not our_kwargs:
        return "does not take **"
    return ""


def our_files(root: Path) -> dict[str, Path]:
    """Our sources that run with vLLM, by their path in the checkout."""
    return dict(_files(root))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in ("libs/vllm_connector/src", "services/encoder/src", "services/prefill_decode/src"):
        for path in sorted((root / folder).rglob("*.py")):
            yield str(path.relative_to(root)), path
