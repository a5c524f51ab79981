"""What a caller sent: bounds, validation, media.

chat_request        Validation of a chat completion's body: what the gateway must know, and what callers may n
content_parts       Content parts of chat messages: which are text, which are media, which are refused.
data_url            `data:` URLs, strictly: what is not exactly a base64 data URL of an image is refused.
image_header        The header of an image: of which format it is, and how large. Pixels are never decoded her
json_bounds         Bounds on a body's JSON text, checked on the raw bytes before anything parses it.
media               Media intake: each item of a request becomes checked bytes with their identity (mm_hash).
placeholder_tokens  Special tokens that stand for media in a rendered prompt may not come from the caller's te
polyglots           Files that are images of two formats at once, depending on who reads them.
prompt_length       Prompts that are longer than the model takes, refused before their media are encoded.
request_body        Reading a request's body, bounded in size and time.
request_options     The gate for what a request says to the model's processor and to the media reader.
"""
