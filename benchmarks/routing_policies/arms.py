"""The arms: each a file of routing profiles, as `TRIPTYCH_ROUTING_FILE` takes it."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ONE, RANDOM, ROUND_ROBIN, LEAST_REQUESTS, AFFINITY = (
    "one_instance",
    "random",
    "round_robin",
    "least_requests",
    "affinity",
)
ARMS = {name: FOLDER / f"{name}.yaml" for name in (ONE, RANDOM, ROUND_ROBIN, LEAST_REQUESTS, AFFINITY)}
