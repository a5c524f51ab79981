"""Folders of models that are made here, once, and kept for later runs."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

COMPLETE = "config.json"


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, written by `make` if it is not there. Whoever asks at the same time makes one too; one stays.

    Args:
        folder: its name must change with what is made: what is there is taken as it is.
        make: writes a model into the folder that it is given.
    """
    if not (folder / COMPLETE).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = folder.with_name(f"{folder.name}.begun-{os.getpid()}")
        shutil.rmtree(begun, ignore_errors=True)
        try:
            make(begun)
            begun.rename(folder)
        except OSError:
            if not (folder / COMPLETE).is_file():
                raise
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return folder
