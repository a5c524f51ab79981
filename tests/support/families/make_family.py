"""A process that writes the model folder of a family.

    python -m tests.support.families.make_family NAME FOLDER

Run by `folders`.
"""

import sys
from pathlib import Path

from tests.support.families.registry import ALL_FAMILIES


def main() -> None:
    name, folder = sys.argv[1:]
    ALL_FAMILIES[name].make(Path(folder))


if __name__ == "__main__":
    main()
