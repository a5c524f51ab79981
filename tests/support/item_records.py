"""Records of items that no model made."""

import io
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from PIL import Image

from triptych_common.protocol.item_record import (
    Batching,
    ItemRecord,
    PackedArray,
    PlaceholderUpdate,
    RecordField,
)
from triptych_common.protocol.messages import Modality

PAD_TOKEN = 7
IMAGE_LIMITS: Mapping[Modality, int] = MappingProxyType({Modality.IMAGE: 16})  # what an engine announces


def item_record(num_embeds: int, grid: Sequence[int] | None = None) -> ItemRecord:
    """Of `num_embeds` placeholders; `grid`: (frames, height, width), kept as `image_grid_thw`."""
    tokens = array("i", [PAD_TOKEN]) * num_embeds
    update = PlaceholderUpdate(
        mode="replace", target=(PAD_TOKEN,), tokens=PackedArray.pack("int32", (num_embeds,), tokens.tobytes())
    )
    fields = []
    if grid is not None:
        fields.append(RecordField(name="image_grid_thw", batching=Batching.BATCHED, value=tuple(grid)))
    return ItemRecord(fields=tuple(fields), updates=(update,))


def grid_of_record(record: ItemRecord) -> list[float]:
    """What `item_record` was given."""
    (field,) = record.fields
    if not isinstance(field.value, tuple):
        raise TypeError("not a record of `item_record`")
    return list(field.value)


def grid_of_media(media: bytes, modality: Modality) -> tuple[int, int, int]:
    """What fakes make of an item: an image's pixels, of other media their bytes.

    Raises:
        Exception: whatever Pillow makes of bytes that are no image.
    """
    if modality is not Modality.IMAGE:
        return 1, 1, len(media)
    with Image.open(io.BytesIO(media)) as image:
        return 1, image.height, image.width
