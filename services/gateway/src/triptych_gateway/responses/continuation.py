"""Request that continues a stored response: what it needs besides its body."""

from dataclasses import replace

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.access.callers import Caller
from triptych_gateway.files.file_record import is_file_id
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.request_options import MEDIA_IO_FIELD, PROCESSOR_FIELD
from triptych_gateway.responses.kept_images import PREVIOUS_FIELD, KeptImages
from triptych_gateway.responses.response_index import FoundResponse, response_not_found
from triptych_gateway.responses.response_record import ResponseImage, ResponseRecord
from triptych_gateway.responses.response_request import ResponseRequest


async def continue_from(
    request: ResponseRequest, found: FoundResponse, images: KeptImages, caller: Caller, max_items: int
) -> ResponseRequest:
    """Return `request` with the images of the conversation before its own; they have no place in its body.

    Raises:
        RequestError: 404, the response is of another model; 400, other options than before, too many images.
    """
    record, response_id = found.record, request.previous_response_id or ""
    if request.model not in ("", record.model):
        raise response_not_found(response_id)
    if record.has_raw_media and (request.processor_options or request.media_io_options):
        raise _other_options(PROCESSOR_FIELD if request.processor_options else MEDIA_IO_FIELD)
    if record.images and request.processor_options != record.processor_options:
        raise _other_options(PROCESSOR_FIELD)
    if record.images and request.media_io_options.get(Modality.IMAGE, {}) != record.media_io_options:
        raise _other_options(MEDIA_IO_FIELD)
    earlier = [
        MediaPart(
            index,
            (),
            Modality.IMAGE,
            "",
            PREVIOUS_FIELD,
            file=await images.find(image, caller, response_id),
        )
        for index, image in enumerate(record.images)
    ]
    own = [replace(part, item_index=part.item_index + len(earlier)) for part in request.media]
    if len(earlier) + len(own) > max_items:
        message = f"a request may hold {max_items} media items at most, with those of the earlier responses"
        raise RequestError(400, "too_many_items", message, PREVIOUS_FIELD)
    body = {**request.body, "model": record.model}  # without it vLLM would take an adapter's base model
    return replace(request, body=body, model=record.model, media=(*earlier, *own))


def record_of(
    request: ResponseRequest,
    items: tuple[TakenItem, ...],
    found: FoundResponse | None,
    *,
    instance: str,
    boot_id: str,
    owner: str,
    is_raw: bool,
) -> ResponseRecord:
    """Return the record of a response when its answer begins; `is_raw` means that its media were sent raw."""
    has_raw_media = is_raw or (found is not None and found.record.has_raw_media)
    kept = [] if is_raw else [item for item in items if request.is_kept(item.part)]
    return ResponseRecord(
        instance=instance,
        boot_id=boot_id,
        owner=owner,
        model=request.model,
        has_events=request.is_background and request.stream,
        has_raw_media=has_raw_media,
        images=tuple(_image_of(item) for item in kept),
        processor_options=request.processor_options if kept else {},
        media_io_options=request.media_io_options.get(Modality.IMAGE, {}) if kept else {},
    )


def _image_of(item: TakenItem) -> ResponseImage:
    if item.image is None:
        raise ValueError("a response has images alone")
    return ResponseImage(
        media_digest=item.media_digest,
        num_bytes=item.num_bytes,
        image=item.image.properties,
        file_id=_file_id(item),
    )


def _file_id(item: TakenItem) -> str | None:
    """Return the id of an uploaded file; images of an earlier response look like files too."""
    file = item.part.file
    return file.file_id if file is not None and is_file_id(file.file_id) else None


def _other_options(name: str) -> RequestError:
    message = f"{name} must be those of the response that the request continues"
    return RequestError(400, "unsupported", message, name)
