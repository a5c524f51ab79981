"""Pure rules without I/O.

errors         the hierarchy of all errors; a new one goes here (its root is in `protocol.errors`)
transitions    the one check of every state machine's steps
hashing        `mm_hash` of media, and namespace digests
jpeg_scans     JPEGs that cost too many passes
containers     which files are video and audio, by their first bytes
media_options  which options of a request callers may set
media_bounds   what one video or sound may cost where it is decoded
engine_args    values among vLLM's command-line options, in any spelling
transports     the choice of a transport for an encoder and its prefill_decodes
fair_queue     order of classes and flows that wait for the same work
transient      which exceptions are worth a retry
"""
