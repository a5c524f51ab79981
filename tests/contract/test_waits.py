"""Tests wait on a condition, not on the wall: no pauses, and no limit that a busy machine meets.

A limit ends a test that hangs; it says nothing about how fast the product is. Limits inside
`pytest.raises`, `suppress` or a `try` that handles the time-out assert that something does NOT come:
a slow machine passes them, so they may be short.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent
LAYERS = ("unit", "property", "contract", "integration")  # real engines and hosts have pauses between faults
MIN_LIMIT_S = 10.0

# File: why it pauses. A longer pause than the written one never makes such a test fail.
PAUSES = {
    "integration/common/bus/test_faults_at_random.py": "faults come at random moments",
    "integration/compose/test_compose.py": "nothing more is written: there is no event to wait for",
    "integration/compose/test_two_hosts.py": "kills an agent in the middle of a transfer",
    "integration/gateway/chat/test_failures.py": "a stand-in outlives its request's deadline",
    "integration/gateway/chat/test_upstream_faults.py": "until the kernel's buffers take no more",
    "integration/gateway/encode/test_order.py": "a stand-in Redis that answers late and out of order",
    "integration/gateway/test_http_protocol.py": "a client that sends its body slowly",
    "integration/gateway/test_ui.py": "a link that is slow",
    "unit/vllm_connector/host/test_engine_watchdog.py": "virtual time",
    "unit/prefill_decode/test_engine_health.py": "virtual time",
    "unit/gateway/test_race.py": "virtual time",
}

LIMIT_KEYWORDS = {"timeout", "limit_s", "timeout_s"}
LIMIT_POSITIONS = {"asyncio.timeout": 0, "asyncio.wait_for": 1, "until": 1, "until_async": 1, "wait_until": 1}
METHODS = {"communicate", "get", "join", "result", "wait"}  # of queues, threads, futures and processes
CLOCKS = ("monotonic()", "perf_counter()", ".time()")
EXPECTED = {"TimeoutError", "Empty", "TimeoutExpired"}


class Waits(ast.NodeVisitor):
    """Collects pauses and short limits of one file, as `line: source`."""

    def __init__(self, tree: ast.Module) -> None:
        self.pauses: list[str] = []
        self.limits: list[str] = []
        self._num_expecting = 0
        self._constants = {
            target.id: number
            for node in tree.body
            if isinstance(node, ast.Assign) and (number := _number(node.value, {})) is not None
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        expects = isinstance(node, ast.With | ast.AsyncWith | ast.Try) and _expects_timeout(node)
        self._num_expecting += expects
        if isinstance(node, ast.Call):
            self._look_at(node)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE):
            elapsed, bound = node.left, _number(node.comparators[0], self._constants)
            is_elapsed = isinstance(elapsed, ast.BinOp) and ast.unparse(elapsed.left).endswith(CLOCKS)
            if is_elapsed and bound is not None and bound < MIN_LIMIT_S:
                self.limits.append(f"{node.lineno}: {ast.unparse(node)}")
        self.generic_visit(node)
        self._num_expecting -= expects

    def _look_at(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("asyncio.sleep", "time.sleep") and _number(node.args[0], self._constants) != 0:
            self.pauses.append(f"{node.lineno}: {ast.unparse(node)}")
        elif not self._num_expecting and name != "asyncio.wait":  # which does not fail when its time is over
            limit = self._limit(node, name)
            if limit is not None and 0 < limit < MIN_LIMIT_S:
                self.limits.append(f"{node.lineno}: {ast.unparse(node)}")

    def _limit(self, node: ast.Call, name: str) -> float | None:
        position = LIMIT_POSITIONS.get(name)
        if position is None and name.rpartition(".")[2] not in METHODS:
            return None
        for keyword in node.keywords:
            if keyword.arg in LIMIT_KEYWORDS:
                return _number(keyword.value, self._constants)
        if position is None or len(node.args) <= position:
            return None
        return _number(node.args[position], self._constants)


def _number(node: ast.expr, constants: dict[str, float]) -> float | None:
    """None: not known without running the test."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _expects_timeout(node: ast.With | ast.AsyncWith | ast.Try) -> bool:
    """Return whether `node` expects or handles the end of a limit."""
    if isinstance(node, ast.Try):
        return any(each.type is not None and _names_timeout(each.type) for each in node.handlers)
    return any(
        isinstance(each, ast.Call)
        and ast.unparse(each.func) in ("pytest.raises", "contextlib.suppress", "suppress")
        and any(map(_names_timeout, each.args))
        for each in (item.context_expr for item in node.items)
    )


def _names_timeout(node: ast.expr) -> bool:
    return any(name in ast.unparse(node) for name in EXPECTED)


FOUND = {
    path.relative_to(TESTS).as_posix(): Waits(ast.parse(path.read_text()))
    for layer in LAYERS
    for path in sorted((TESTS / layer).rglob("*.py"))
}


def test_tests_do_not_pause() -> None:
    pauses = {name: found.pauses for name, found in FOUND.items() if found.pauses and name not in PAUSES}
    assert not pauses, "wait on a condition (`tests.support.waiting`) or on virtual time"


def test_limits_are_far_above_what_a_busy_machine_needs() -> None:
    limits = {name: found.limits for name, found in FOUND.items() if found.limits}
    assert not limits, f"a limit of less than {MIN_LIMIT_S} s fails on a busy machine"


def test_files_that_may_pause_do() -> None:
    assert not [name for name in PAUSES if not FOUND[name].pauses]
