"""Page at `/ui`: its content, and each caller's view. `tracing.recent_requests` has its requests.

page           the page's files: HTML, style and scripts in `static`, and the headers that they get
system_view    the gateway's view of the system: instances, queues, load, caches
store_reader   use of the cache_store, if its socket is on this host
live_view      both together, for one caller
event_stream   the same as server-sent events
"""
