"""Which image decoders vLLM's own reader may use, where an instance reads raw images (local encode)."""

from collections.abc import Sequence


def read_image_formats_only(formats: Sequence[str]) -> None:
    """From now on this process's vLLM opens images of these formats alone, by Pillow's names, in this order.

    vLLM would try every still-image decoder that Pillow has, and in another order than the gateway.

    Raises:
        TypeError: vLLM keeps something else there.
    """
    from vllm.multimodal import image

    if not isinstance(image.ALLOWED_IMAGE_FORMATS, tuple):
        raise TypeError("vLLM's list of image formats is not where it was")
    image.ALLOWED_IMAGE_FORMATS = tuple(formats)
