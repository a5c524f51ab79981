"""Media cut out of a body while it arrives, so that they are never held as text. Pure: no I/O, no clock.

body_splitter    the body in pieces: separates media from text
base64_decoder   base64 in pieces, strictly
split_body       the result: JSON text with a marker for each of the media, and their bytes
data_url         data URLs, strictly: of media that were cut out, and of others

A body is split only where that cannot be told from reading it whole. In any other case it is put back as it
came (`SplitBody.put_back`), and read whole.
"""
