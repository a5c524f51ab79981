"""A server of the queueing kind: work is done in the order in which it comes, `num_workers` at once.

The end of a piece of work is known when it comes, so a server takes no events of its own. That is what makes
runs with tens of engines and thousands of streams cheap. With several workers the order of ends may differ.
"""

import heapq

import simpy


class Server:
    """Busy time is counted, so that its share of a run is the utilisation."""

    def __init__(self, env: simpy.Environment, num_workers: int = 1) -> None:
        self._env = env
        self._free_at = [0.0] * num_workers  # a heap
        self.num_workers = num_workers
        self.busy_s = 0.0

    def work(self, seconds: float) -> float:
        """Takes `seconds` of work now; returns when, in the run's seconds, it will be done."""
        end = max(self._env.now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        self.busy_s += seconds
        return end

    def done(self, seconds: float, extra_s: float = 0.0) -> simpy.Timeout:
        """An event at the end of the work; `extra_s` later, without occupying the server."""
        return self._env.timeout(self.work(seconds) + extra_s - self._env.now)

    def utilisation(self, seconds: float) -> float:
        return self.busy_s / (seconds * self.num_workers) if seconds else 0.0
