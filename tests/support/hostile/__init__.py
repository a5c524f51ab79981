"""What a careless or hostile caller may send, the same every time.

images    images that are cut off, oversized, of two formats, or rare
chunks    PNG, BMP and JPEG files put together by hand
options   option sets of requests
"""
