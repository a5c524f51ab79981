"""What the page at `/ui` shows, and to whom. Its requests are those of `tracing.recent_requests`.

page           the page's files: HTML, style and scripts in `static`, and the headers that they get
system_view    what the gateway sees of the system: instances, queues, load, caches
store_reader   how full the cache_store is, where its socket is on this host
live_view      both together, for one caller
event_stream   the same as server-sent events
"""
