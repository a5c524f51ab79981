"""Which images are taken at all: the defaults that gateway, encoder and prefill_decode share."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # names of Pillow's formats
MAX_IMAGE_PIXELS = 64_000_000
