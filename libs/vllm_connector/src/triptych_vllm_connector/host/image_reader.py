"""Images: those that Pillow decodes in a child process, and the formats that vLLM's own reader may open."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from triptych_common.domain.media_bounds import refused_codec
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.images import image_of, is_bounded
from triptych_vllm_connector.decoding.processes import DecodeProcesses, MediaRefusedError
from triptych_vllm_connector.seams.replacing import replace


def decoded_apart(opened: Image.Image, media: bytes, processes: DecodeProcesses) -> Image.Image | None:
    """Decode in a child process what a thread of this one should not; `opened` from `media`, not yet loaded.

    Returns None if this process may decode it, which is true for most images; else it is upright and loaded.

    Raises:
        MediaRefusedError: its compression is not decoded here, or takes too much time or memory.
        DecoderError: the decoder failed on it.
    """
    bounds = processes.bounds
    if opened.format == "TIFF":
        compression = refused_codec([str(opened.info.get("compression"))], bounds.tiff_compressions)
        if compression is not None:
            raise MediaRefusedError(f"the compression {compression!r} of the image is not decoded here")
    if is_bounded(opened, media):
        return None
    with processes.lend(media, "image") as session:
        # Pillow's reader of JPEG opens those of several pictures (MPO), too.
        image_format = "JPEG" if opened.format == "MPO" else str(opened.format)
        request = messages.LoadImage(image_format, *opened.size)
        found = session.ask(request, messages.Pixels)
        return image_of(
            found.mode,
            (found.width, found.height),
            session.view(found.num_bytes),
            found.palette_mode,
            found.palette,
            found.transparency,
        )


def read_image_formats_only(formats: Sequence[str], processes: DecodeProcesses) -> None:
    """Make this process's vLLM open images of these formats only, by Pillow's names, in this order.

    vLLM would try every still-image decoder that Pillow has, and in another order than the gateway.

    Raises:
        SeamNotFoundError: vLLM keeps something else there.
    """
    from vllm.multimodal import image
    from vllm.multimodal.media import image as reader

    open_bounded = image.open_image
    replace(image, "ALLOWED_IMAGE_FORMATS", tuple(formats), used_by=(open_bounded,))

    def open_image(file: Any) -> Image.Image:
        opened = open_bounded(file)
        return decoded_apart(opened, file.getvalue(), processes) or opened

    replace(reader, "open_image", open_image, used_by=(reader.ImageMediaIO.load_bytes,), everywhere=False)
