"""Pure rules without I/O.

errors         the hierarchy of all errors
transitions    the one check of every state machine's steps
hashing        `mm_hash` of media, and namespace digests
image_formats  formats that are taken; `jpeg_scans` counts the passes that a JPEG costs its decoder
media_options  which options of a request callers may set
transports     which transport a producer and its consumers use
transient      whether trying again may help after an exception
"""
