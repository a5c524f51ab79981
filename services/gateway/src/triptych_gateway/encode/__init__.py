"""What requests need of encoders, and what has become of it. In the order of an item.

media_wait       one request's wait for its items: sizes, failures, deadline
encoder_return   whether an encoder that is missing may come back
encode_wait      how long a request waits, and when it gives up encoders
encode_orders    starts flights, handles encoders' messages, reconciles with Redis; owns what is indented
item_table         the state of each item that a request waits for (drawn there); pure
media_cache        media bytes while a request needs them, served to encoders
sizes              placeholder sizes, in memory and in Redis
item_queue         the items that a step is due for; new orders take turns there
job_window         how many jobs this gateway may have with encoders; pure
flight_requests    which requesters Redis knows of, in the flight of which item
admission          refuses a request at once whose media could not be encoded in time
encode_job         the job itself, made from the requests that wait
stream_lags      what waits on the streams, for a scrape
final_acks       the gateway's own acks to encoders, where prefill_decode will not send one
"""
