"""Allowlist of image formats, and the limit of their size: defaults of gateway, encoder, prefill_decode."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # names of Pillow's formats
MAX_IMAGE_PIXELS = 64_000_000
