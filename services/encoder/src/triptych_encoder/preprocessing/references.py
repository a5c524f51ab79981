"""Reference media, small and large, from which the form of the model's items is learned (`item_schema`).

Every property of an item that depends on the size of its media must differ among them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from vllm.multimodal.media.base import MediaWithBytes

from triptych_common.protocol.messages import Modality

MIN_REFERENCES = 3  # of a modality, that the model takes

# (width, height): square, wide and tall.
IMAGE_SIZES = ((40, 40), (224, 224), (448, 300), (336, 672), (900, 220), (1024, 768))
# (frames, width, height, frames a second)
VIDEOS = ((2, 112, 112, 1.0), (4, 224, 112, 2.0), (8, 112, 224, 4.0), (6, 160, 96, 24.0), (3, 320, 240, 30.0))
# (seconds, samples a second)
# Models cut audio into pieces, of 30 s as a rule, or pad it to a length of minutes.
AUDIO = tuple((seconds, 16_000) for seconds in (0.5, 1.0, 2.7, 11.3, 31.0, 65.0, 310.0))

GREY = 127


def reference_media(modality: Modality) -> Mapping[str, Any]:
    """Reference media by name (for logs), as decoders give them to vLLM's renderer."""
    if modality is Modality.IMAGE:
        return {f"{width}x{height}": _image(width, height) for width, height in IMAGE_SIZES}
    if modality is Modality.VIDEO:
        return {f"{each[0]} frames of {each[1]}x{each[2]}": _video(*each) for each in VIDEOS}
    return {f"{seconds} s": _audio(seconds, rate) for seconds, rate in AUDIO}


def _image(width: int, height: int) -> Any:
    return MediaWithBytes(Image.new("RGB", (width, height), (GREY, GREY, GREY)), b"reference")


def _video(num_frames: int, width: int, height: int, fps: float) -> Any:
    frames = np.full((num_frames, height, width, 3), GREY, dtype=np.uint8)
    metadata = {
        "total_num_frames": num_frames,
        "fps": fps,
        "duration": num_frames / fps,
        "video_backend": "opencv",
        "frames_indices": list(range(num_frames)),
        "do_sample_frames": False,
    }
    return MediaWithBytes((frames, metadata), b"reference")


def _audio(seconds: float, rate: int) -> Any:
    return np.zeros(int(seconds * rate), dtype=np.float32), rate
