"""Goes through the interleavings: every order of steps from a start, as far as the bounds reach.

Depth first. A coroutine cannot be copied, so the way back is to take the same steps again in a new world.
Steps of different actors commute, so of such orders one is enough (sleep sets); a state that was seen
before is not left again, unless more may happen from it now.

`max_deviations`: an order is the usual one but for so many places. The usual one goes around the actors,
and each does what it can do first. None: all orders.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.support.protocol_world.config import Config, Enabled, Key
from tests.support.protocol_world.fingerprint import Fingerprints
from tests.support.protocol_world.transfers.world import new_world
from tests.support.protocol_world.world import World

MAX_DEPTH = 600


@dataclass
class Bounds:
    max_deviations: int | None = None
    max_states: int | None = None


@dataclass
class Explored:
    """What was gone through."""

    num_states: int = 0
    num_transitions: int = 0
    num_ends: int = 0  # times that nothing was left to happen
    max_depth: int = 0
    cpu_seconds: float = 0.0
    is_complete: bool = True
    coverage: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


class BrokenError(AssertionError):
    """Something that must not happen, and the steps that lead to it."""

    def __init__(self, config: Config, path: list[Key], why: str) -> None:
        steps = "\n".join(f"  {' '.join(part for part in key if part)}" for key in path)
        super().__init__(f"{why}\nin {config}\nafter\n{steps}")
        self.path = path
        self.why = why


@dataclass
class _Visit:
    """A state on the way down, and what is left to do there."""

    usual: Key | None  # what would be done first here
    todo: list[Enabled]
    sleeping: dict[Key, frozenset[str]]
    deviations: int


class Explorer:
    def __init__(self, config: Config, bounds: Bounds) -> None:
        self.config = config
        self.bounds = bounds
        self.result = Explored()
        self._seen: dict[int, tuple[frozenset[Key], int]] = {}
        self._path: list[Key] = []

    def run(self) -> Explored:
        """Raises BrokenError."""
        started = time.process_time()
        world = new_world(self.config)
        prints = Fingerprints(world)
        stack = [self._visit(world, prints, frozenset(), {}, self.bounds.max_deviations or 0)]
        while stack:
            top = stack[-1]
            if top is None or not top.todo:
                stack.pop()
                if self._path:
                    self._path.pop()
                continue
            if self.bounds.max_states is not None and len(self._seen) >= self.bounds.max_states:
                self.result.is_complete = False
                break
            chosen = top.todo.pop(0)
            if len(world.path) != len(self._path):  # it went on from here before
                world.close()
                world = self._again()
                prints = Fingerprints(world)
            sleeping = {key: actors for key, actors in top.sleeping.items() if not actors & chosen.actors}
            if self.bounds.max_deviations is None and not chosen.is_fault:
                top.sleeping[chosen.key] = chosen.actors
            deviations = top.deviations
            if self.bounds.max_deviations is not None and not chosen.is_fault:
                deviations -= chosen.key != top.usual
            self._path.append(chosen.key)
            self._take(world, chosen)
            stack.append(self._visit(world, prints, chosen.actors, sleeping, deviations))
        world.close()
        self.result.num_states = len(self._seen)
        self.result.cpu_seconds = time.process_time() - started
        return self.result

    # ---- one state -------------------------------------------------------------------------------
    def _visit(
        self,
        world: World,
        prints: Fingerprints,
        changed: frozenset[str],
        sleeping: dict[Key, frozenset[str]],
        deviations: int,
    ) -> "_Visit | None":
        """None: there is nothing to do from here."""
        enabled = self._ordered(world)
        if not any(not each.is_fault for each in enabled):
            self._end(world)
        print_ = prints.take(changed)
        before = self._seen.get(print_)
        todo = [each for each in enabled if each.key not in sleeping]
        if self.bounds.max_deviations is not None:
            if before is not None and before[1] >= deviations:
                return None
            self._seen[print_] = (frozenset(), deviations)
            if deviations == 0:
                todo = [each for index, each in enumerate(todo) if index == 0 or each.is_fault]
        elif before is None:
            self._seen[print_] = (frozenset(sleeping), 0)
        else:
            slept = before[0] - sleeping.keys()
            if not slept:
                return None
            self._seen[print_] = (before[0] & sleeping.keys(), 0)
            todo = [each for each in enabled if each.key in slept]
        if len(self._path) >= MAX_DEPTH:
            raise BrokenError(self.config, self._path, "it never ends")
        usual = enabled[0].key if enabled else None
        return _Visit(usual, todo, dict(sleeping), deviations)

    def _ordered(self, world: World) -> list[Enabled]:
        """Enabled steps, the usual one first: of the actor whose turn is next."""
        enabled = world.enabled()
        if self.bounds.max_deviations is None:
            return enabled
        usual = [each for each in enabled if not each.is_fault]
        if usual:
            after = [each for each in usual if min(each.actors) > world.last_actor]
            first = min(after or usual, key=lambda each: min(each.actors))
            enabled.remove(first)
            enabled.insert(0, first)
        return enabled

    def _take(self, world: World, chosen: Enabled) -> None:
        self.result.num_transitions += 1
        self.result.max_depth = max(self.result.max_depth, len(self._path))
        self.result.coverage[chosen.key.kind] += 1
        try:
            world.take(chosen.key)
            world.last_actor = min(chosen.actors)
            world.check()
        except Exception as error:
            raise BrokenError(self.config, self._path, f"{type(error).__name__}: {error}") from error

    def _end(self, world: World) -> None:
        self.result.num_ends += 1
        try:
            world.check_quiet()
        except AssertionError as error:
            raise BrokenError(self.config, self._path, str(error)) from error
        for request in world.requests.values():
            self.result.outcomes[str(request.outcome)] += 1

    # ---- worlds ----------------------------------------------------------------------------------
    def _again(self) -> World:
        world = new_world(self.config)
        for key in self._path:
            world.take(key)
        return world
