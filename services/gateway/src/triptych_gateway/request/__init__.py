"""Requests of callers: bounds, validation, media. In the order of a request:

request_body        reads the body, bounded in size and time
body_splitter         media are cut out of it while it arrives; data_url reads base64
body_bounds         counts the values of its JSON before anything parses it; bounds its fields
chat_request        parses and validates it, if it is a chat
forms/                fields by its form
text_request        the same for bodies of other endpoints, which hold no media
item_checks           check that an item is what its part says
content_parts         its text and media parts; others are refused
placeholder_tokens    no text may contain a token that stands for media
media               its media, fetched where they are named by URL, checked, named by their mm_hash
named_items           items that a caller's `uuid` names
image_header          an image's format and size, without decoding it
prompt_length       a prompt that is longer than the model takes is refused before its media are encoded
"""
