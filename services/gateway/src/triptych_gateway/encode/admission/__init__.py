"""Admission of items to the queue for encoders; others get 429 at once, with the time to come back.

encode_admission  decides, for a request as a whole; owns what is indented
encode_backlog      seconds of encoding that were ordered, and how fast they are done; pure
return_times        time at which a refused request may come back; pure
job_queue         limits by the orders that wait; pure
"""
