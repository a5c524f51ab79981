"""Encodes: requests' needs of encoders, and their state. In the order of an item:

item_wait       one request's wait for its items: sizes, failures, deadline
encode_orders    starts flights, handles encoders' messages, reconciles with Redis; owns what is indented
item_table         the state of each item that a request waits for (drawn there); pure
media_cache        media bytes while a request needs them, served to encoders
sizes              placeholder sizes, in memory and in Redis
item_queue         items with a step due; new orders take turns there
job_window         bound on this gateway's jobs with encoders; pure
flight_requests    requesters in each item's flight in Redis
encode_admission   refuses a request whose media could not be encoded in time, by encode_backlog
scrape_gauges    entries that wait on the streams, and seconds of work that wait for each stage
final_acks       the gateway's own acks to encoders, where prefill_decode will not send one
"""
