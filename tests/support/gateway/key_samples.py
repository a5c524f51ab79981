"""Files of API keys for the gateway's tests."""

import hashlib


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, tenant: str | None = None) -> str:
    """One key of the file."""
    line = "" if tenant is None else f'tenant = "{tenant}"\n'
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key)}"\n{line}'


KEYS = (
    entry("alice", "key-alice", "red")
    + entry("anna", "key-anna", "red")
    + entry("bob", "key-bob", "blue")
    + entry("carol", "key-carol")
)
