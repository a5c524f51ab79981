"""Put on an encoder's path: while a certain file exists, nothing checks what the tower is given."""

import os
import sys
from pathlib import Path

SWITCH = "TEST_UNCHECKED_ITEMS"

if SWITCH in os.environ and "triptych_encoder" in sys.orig_argv:
    from triptych_encoder.preprocessing import item_schema

    switch = Path(os.environ[SWITCH])
    check = item_schema.ItemSchema.check

    def unless_switched_off(self, item, num_embeds):
        if not switch.exists():
            check(self, item, num_embeds)

    item_schema.ItemSchema.check = unless_switched_off
