"""Check of a request's items by modality against the limits that the encoding engines announce."""

from collections import Counter
from collections.abc import Iterable, Mapping

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.content_parts import MediaPart


def check_counts(parts: Iterable[MediaPart], limits: Mapping[Modality, int]) -> None:
    """Check the counts before anything is fetched or encoded.

    Raises:
        RequestError: 400 naming the first part that is not taken.
    """
    if not limits:
        return
    counts: Counter[Modality] = Counter()
    for part in parts:
        limit = limits.get(part.modality, 0)
        counts[part.modality] += 1
        if not limit:
            message = f"{part.path}: the model takes no {part.modality}, only {', '.join(sorted(limits))}"
            raise RequestError(400, "unsupported_media", message, part.path)
        if counts[part.modality] > limit:
            message = f"{part.path}: a request may hold {limit} items of type {part.modality} at most"
            raise RequestError(400, "too_many_items", message, part.path)
