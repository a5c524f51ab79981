"""Range of the numbers of cores that computed a step."""

from dataclasses import dataclass


@dataclass
class CoreRange:
    """Fewest and most cores of one step, whose layers may have had different numbers."""

    fewest: int
    most: int

    def add(self, num_cores: int) -> None:
        """Extend the range by a layer on `num_cores`."""
        self.fewest, self.most = min(self.fewest, num_cores), max(self.most, num_cores)
