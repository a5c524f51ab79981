"""What a caller sent: bounds, validation, media. In the order of a request.

request_body        reads the body, bounded in size and time
split/                media are cut out of it while it arrives
json_bounds         counts the values of its JSON before anything parses it
chat_request        parses and validates it, if it is a chat
forms/                what is read of it by its form
text_request        the same for bodies of other endpoints, which hold no media
item_checks           is an item what its part says it is
item_counts           how many of which kind the model takes
request_options       which options it may set for the model's processor and the media reader
content_parts         its text and media parts; others are refused
places                where a value stands in a body
placeholder_tokens    no text may contain a token that stands for media
known_file          an uploaded file: what is known of it, and how its bytes are read
media               its media, fetched where they are named by URL, checked, named by their mm_hash
image_header          an image's format and size, without decoding it
polyglots             no file that is an image of two formats
prompt_length       a prompt that is longer than the model takes is refused before its media are encoded
"""
