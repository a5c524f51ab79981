"""One request that is forwarded: from its first byte to prefill_decode, and its answer back.

Chat completions, and what goes the same way without media. In the order of a request.

exchange       the HTTP exchange: admitted, read, parsed, served, answered or refused
routing_headers  what its headers say of where it may go
sound_request  a form with a sound: read, checked, and made anew
media_serving  a request with media: sizes waited for, forwarded with metadata, or whole where encoders fail
upstream_body    what is sent: text, metadata in the place of media, or the raw media
media_parts        the parts that stand for media, by the form of the chat
forward        to one instance after the other, until one answers; then its answer to the client
upstream         HTTP to one prefill_decode, up to the first chunk of its answer
streaming        the answer to the client, from its first chunk on
sse                server-sent events as bytes, cut into whole ones; how many tokens they bring
token_times        when tokens pass, for the metrics
"""
