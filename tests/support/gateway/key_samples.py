"""Files of API keys for the gateway's tests."""

import hashlib
import json
from pathlib import Path


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, tenant: str | None = None, **limits: int | list[str]) -> str:
    """One key of the file."""
    lines = "" if tenant is None else f'tenant = "{tenant}"\n'
    lines += "".join(f"{limit} = {json.dumps(value)}\n" for limit, value in limits.items())
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key)}"\n{lines}'


def write_keys(path: Path, *entries: str) -> Path:
    """The file of keys at `path`, changed in one step."""
    new = path.with_suffix(".new")
    new.write_text("".join(entries))
    new.chmod(0o600)
    return new.rename(path)


KEYS = (
    entry("alice", "key-alice", "red")
    + entry("anna", "key-anna", "red")
    + entry("bob", "key-bob", "blue")
    + entry("carol", "key-carol")
)
