"""Transports of the agents of a test, and whether they are there."""

import importlib.util
import json

HAS_NIXL = importlib.util.find_spec("nixl") is not None
UCX_BETWEEN_HOSTS = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""Environment of agents on hosts of their own: not by this machine's memory, which hosts do not share."""


def transports_option(*transports: str) -> str:
    """Of an agent; best first."""
    return f"--fabric-transports={json.dumps(transports)}"
