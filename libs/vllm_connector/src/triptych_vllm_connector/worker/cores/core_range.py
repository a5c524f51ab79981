"""On how many cores a step was computed."""

from dataclasses import dataclass


@dataclass
class CoreRange:
    """Fewest and most cores of one step: its layers may have had different ones."""

    fewest: int
    most: int

    def add(self, num_cores: int) -> None:
        """A layer may use `num_cores`."""
        self.fewest, self.most = min(self.fewest, num_cores), max(self.most, num_cores)
