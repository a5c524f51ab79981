"""Option sets of requests, from the careless to the malicious."""

from typing import Any

Fields = dict[str, Any]

ALLOWED_PROCESSOR_OPTIONS = {
    "min_pixels": {"min": 784, "max": 50_176},
    "max_pixels": {"min": 784, "max": 200_704},
    "do_convert_rgb": {"values": [True]},
}
ALLOWED_IMAGE_OPTIONS = {"image_mode": {"values": ["RGB", "L"]}}

ALLOWED: list[Fields] = [
    {"mm_processor_kwargs": {"max_pixels": 784}},
    {"mm_processor_kwargs": {"max_pixels": 6_272}},
    {"mm_processor_kwargs": {"max_pixels": 200_704}},
    {"mm_processor_kwargs": {"min_pixels": 50_176}},
    {"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 3_136}},
    {"mm_processor_kwargs": {"do_convert_rgb": True}},
    {"media_io_kwargs": {"image": {"image_mode": "RGB"}}},
    {"media_io_kwargs": {"image": {"image_mode": "L"}}},
]
"""Within the bounds above."""

NOTHING: list[Fields] = [
    {"mm_processor_kwargs": None},
    {"mm_processor_kwargs": {}},
    {"media_io_kwargs": None},
    {"media_io_kwargs": {}},
]
"""They set nothing, so they are answered everywhere."""

_PROCESSOR: list[Any] = [
    {"patch_size": 7},
    {"patch_size": 28},
    {"patch_size": 0},
    {"patch_size": -14},
    {"temporal_patch_size": 1},
    {"temporal_patch_size": 3},
    {"merge_size": 1},
    {"merge_size": 4},
    {"patch_size": 7, "merge_size": 4},
    {"min_pixels": 40_000_000, "max_pixels": 40_000_000},
    {"min_pixels": 50_177},
    {"min_pixels": 783},
    {"max_pixels": 0},
    {"max_pixels": -1},
    {"max_pixels": 10**30},
    {"max_pixels": 784.5},
    {"max_pixels": 3136.0},
    {"max_pixels": True},
    {"max_pixels": "3136"},
    {"max_pixels": None},
    {"max_pixels": [3136]},
    {"max_pixels": {"value": 3136}},
    {"min_pixels": 50_000, "max_pixels": 800},
    {"size": {"shortest_edge": 784, "longest_edge": 10**12}},
    {"size": {"height": 100_000, "width": 100_000}},
    {"resample": 99},
    {"do_resize": False},
    {"do_rescale": False},
    {"do_normalize": False},
    {"do_convert_rgb": False},
    {"do_convert_rgb": 1},
    {"image_mean": [0.5]},
    {"image_mean": [1e308, 1e308, 1e308]},
    {"image_std": [0, 0, 0]},
    {"rescale_factor": 1e308},
    {"return_tensors": "np"},
    {"device": "cuda:0"},
    {"data_format": "channels_last"},
    {"input_data_format": "channels_first"},
    {"disable_grouping": True},
    {"images_kwargs": {"max_pixels": 3136}},
    {"__class__": "x"},
    {"": 1},
    {"max_pixels ": 3136},
    {"x" * 5000: 1},
    {"a": {"b": {"c": {"d": [1] * 1000}}}},
    [{"max_pixels": 3136}],
    "max_pixels",
    7,
]
_MEDIA_IO: list[Any] = [
    {"image": {"image_mode": "CMYK"}},
    {"image": {"image_mode": "I;16"}},
    {"image": {"image_mode": None}},
    {"image": {"rgba_background_color": [0, 0, 0]}},
    {"image": {"rgba_background_color": [0, 0]}},
    {"image": {"nonsense": 1}},
    {"image": 7},
    {"video": {"num_frames": 10**9}},
    {"smell": {}},
    ["image"],
]

HOSTILE: list[Fields] = [{"mm_processor_kwargs": each} for each in _PROCESSOR] + [
    {"media_io_kwargs": each} for each in _MEDIA_IO
]
"""Refused, whatever is allowed."""
