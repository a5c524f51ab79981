"""Encodes: requests' needs of encoders, and their state. In the order of an item:

media_wait       one request's wait for its items: sizes, failures, deadline
encoder_return   check for encoders that may come back
encode_wait      limits of a request's wait for encoders
encode_orders    starts flights, handles encoders' messages, reconciles with Redis; owns what is indented
item_table         the state of each item that a request waits for (drawn there); pure
media_cache        media bytes while a request needs them, served to encoders
sizes              placeholder sizes, in memory and in Redis
item_queue         items with a step due; new orders take turns there
job_window         bound on this gateway's jobs with encoders; pure
flight_requests    requesters in each item's flight in Redis
admission          refuses a request whose media could not be encoded in time
encode_job         the job itself, made from the requests that wait
stream_lags      entries that wait on the streams, for a scrape
final_acks       the gateway's own acks to encoders, where prefill_decode will not send one
"""
