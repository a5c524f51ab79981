"""Requests of callers: bounds, validation, media. In the order of a request:

request_body        reads the body, bounded in size and time
split/                media are cut out of it while it arrives
json_bounds         counts the values of its JSON before anything parses it
chat_request        parses and validates it, if it is a chat
forms/                fields by its form
text_request        the same for bodies of other endpoints, which hold no media
item_checks           check that an item is what its part says
item_counts           items by modality that the model takes
request_options       options it may set for the model's processor and the media reader
content_parts         its text and media parts; others are refused
places                place of a value in a body
placeholder_tokens    no text may contain a token that stands for media
known_file          an uploaded file: its record, and a reader of its bytes
media               its media, fetched where they are named by URL, checked, named by their mm_hash
image_header          an image's format and size, without decoding it
polyglots             no file that is an image of two formats
prompt_length       a prompt that is longer than the model takes is refused before its media are encoded
"""
