"""Encoders: slots that take jobs off the stream, threads that preprocess, an engine that encodes in steps."""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from simulation.parameters import Deployment, EncoderCosts
from simulation.requests import Item
from simulation.servers import Server


class EncoderModel:
    """One instance. `publish(item)` and `seal(item, encoder's host)` are the way out: yields of the
    caller's."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: EncoderCosts,
        deployment: Deployment,
        jobs: simpy.Store,
        host: int,
        *,
        shares_core: bool,
        row_bytes: int,
        publish: Callable[[Item], simpy.Event],
        seal: Callable[[Item, int], simpy.Event],
    ) -> None:
        self._env, self._costs, self._jobs, self._host = env, costs, jobs, host
        self._row_bytes, self._publish, self._seal = row_bytes, publish, seal
        self._batch_items = deployment.batch_items
        self.engine = Server(env)
        self.threads = self.engine if shares_core else Server(env, costs.num_threads)
        self._waiting: list[tuple[Item, simpy.Event]] = []
        self._wake = env.event()
        self._gets: set[simpy.Event] = set()  # of slots that wait for a job
        self._is_ending = False
        self.num_encoded = 0
        self.num_steps = 0
        for _ in range(deployment.num_slots + deployment.num_ahead):
            env.process(self._slot())
        env.process(self._encode())

    def end(self) -> None:
        """Take no job any more; those in hand are ended."""
        self._is_ending = True
        for waiting in self._gets:
            waiting.cancel()  # type: ignore[attr-defined]

    def _slot(self) -> Generator[simpy.Event, Any, None]:
        costs = self._costs
        while not self._is_ending:
            waiting = self._jobs.get()
            self._gets.add(waiting)
            item: Item = yield waiting
            self._gets.discard(waiting)
            yield self.threads.done(
                costs.preprocess_s + costs.preprocess_row_s * item.rows, extra_s=costs.reserve_s
            )
            item.encoder_host = self._host
            self._publish(item)
            encoded = self._env.event()
            self._waiting.append((item, encoded))
            if not self._wake.triggered:
                self._wake.succeed()
            yield encoded

    def _encode(self) -> Generator[simpy.Event, Any, None]:
        costs = self._costs
        while True:
            if not self._waiting:
                self._wake = self._env.event()
                yield self._wake
            batch = self._take()
            rows = sum(item.rows for item, _ in batch)
            copy_s = rows * self._row_bytes / costs.write_bytes_per_s
            yield self.engine.done(costs.step_s + costs.row_s * rows + copy_s)
            self.num_steps += 1
            self.num_encoded += len(batch)
            for item, encoded in batch:
                self._seal(item, self._host)
                encoded.succeed()

    def _take(self) -> list[tuple[Item, simpy.Event]]:
        limit = self._batch_items or len(self._waiting)
        taken, rows = 0, 0
        for item, _ in self._waiting[:limit]:
            if taken and rows + item.rows > self._costs.step_rows:
                break
            taken, rows = taken + 1, rows + item.rows
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch
