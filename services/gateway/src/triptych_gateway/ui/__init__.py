"""Page at `/ui`: its content, and each caller's view. `tracing.recent_requests` has its requests.

system_view    the gateway's view of the system: instances, queues, load, caches
live_view      both together, for one caller, as events while a page is open; the files of the page
"""
