"""Wire types, which live nowhere else.

ids       identifiers as types
item_record  what a language model needs to know of an item, inside messages
messages  every message on Redis Streams, and the registry's record
transfers  messages about entries that go from one host's store to another's
store     every frame on the store's socket
codec     messages and frames to bytes and back; `errors`: what cannot be decoded
names     streams and keys of a deployment in Redis
urls      forms of URLs in messages and settings
item_urls  media items as URLs, in requests for prefill_decode
"""
