"""Which failures are tried again, and when. Pure: chance is an argument."""

from dataclasses import dataclass

from triptych_gateway.fetch.failures import ServerFailedError

FIRST_WAIT_S = 0.2
MAX_WAIT_S = 2.0
MAX_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """One per gateway."""

    max_attempts: int

    def wait_s(self, num_attempts: int, error: ServerFailedError, chance: float) -> float | None:
        """Seconds until the next attempt after `num_attempts` of them; None: there is none.

        Args:
            chance: from 0 to 1, so that those who failed together do not come back together.
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
