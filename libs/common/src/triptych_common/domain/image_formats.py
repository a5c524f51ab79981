"""Allowlist of image formats, and the limit of their size: defaults of gateway, encoder, prefill_decode."""

# Names of Pillow's formats. TGA, which has no signature, is tried when no other format is found.
IMAGE_FORMATS = (
    *("PNG", "JPEG", "WEBP", "GIF", "BMP"),
    *("TIFF", "AVIF", "JPEG2000", "PPM", "QOI", "ICO", "TGA"),
)
MAX_IMAGE_PIXELS = 64_000_000
