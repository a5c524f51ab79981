"""Put on an encoder's path: while a certain file exists, nothing checks what the tower is given."""

import os
import sys
from pathlib import Path
from typing import Any

SWITCH = "TEST_UNCHECKED_ITEMS"

if SWITCH in os.environ and "triptych_encoder" in sys.orig_argv:
    from triptych_encoder.preprocessing.item_schema import ItemSchema

    switch = Path(os.environ[SWITCH])
    schema: Any = ItemSchema
    check = schema.check

    def unless_switched_off(self: Any, item: Any, num_embeds: int) -> None:
        if not switch.exists():
            check(self, item, num_embeds)

    schema.check = unless_switched_off
