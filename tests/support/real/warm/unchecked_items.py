"""While a file exists that a test has named, nothing checks what an encoder's tower is given.

`preload` imports it, so it is in every process that is forked. Without the variable everything is checked.

    UNCHECKED_ITEMS=FILE
"""

import os
from pathlib import Path
from typing import Any

from triptych_encoder.preprocessing.item_schema import ItemSchema

FILE_VARIABLE = "UNCHECKED_ITEMS"
_check = ItemSchema.check


def _check_unless_switched_off(self: ItemSchema, item: Any, num_embeds: int) -> None:
    file = os.environ.get(FILE_VARIABLE)
    if file is None or not Path(file).exists():
        _check(self, item, num_embeds)


ItemSchema.check = _check_unless_switched_off  # type: ignore[method-assign]
