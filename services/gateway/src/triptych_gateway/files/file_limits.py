"""Bounds on files, on a key's files, and on their lifetimes."""

from dataclasses import dataclass

KEPT_NAME_CHARS = 255  # of the name that the client gives


@dataclass(frozen=True, slots=True)
class FileLimits:
    max_file_bytes: int
    max_bytes: int  # of all files together
    max_files: int
    max_key_bytes: int  # of one API key's
    max_key_files: int
    lifetime_s: int  # unless the upload names another one
    max_lifetime_s: int
