"""Retries of failed fetches: which, and when. Pure: chance is an argument."""

from dataclasses import dataclass

from triptych_gateway.fetch.failures import ServerFailedError

FIRST_WAIT_S = 0.2
MAX_WAIT_S = 2.0
MAX_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry policy of one gateway."""

    max_attempts: int

    def wait_s(self, num_attempts: int, error: ServerFailedError, chance: float) -> float | None:
        """Return the seconds until the next attempt after `num_attempts`; None: there is none.

        Args:
            chance: number from 0 to 1 that spreads the retries of attempts that failed together.
        """
        if num_attempts >= self.max_attempts:
            return None
        doubled_s = min(FIRST_WAIT_S * 2.0 ** (num_attempts - 1), MAX_WAIT_S)
        wait_s = doubled_s * (0.5 + chance / 2)
        if error.retry_after_s is None:
            return wait_s
        if error.retry_after_s > MAX_RETRY_AFTER_S:
            return None
        return max(error.retry_after_s, wait_s)
