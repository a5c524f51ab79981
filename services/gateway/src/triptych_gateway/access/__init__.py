"""Access: which callers are served, and limits of requests at once and per caller.

auth             callers, their API keys, and the file of keys
request_limiter  bounds on requests, and on the bytes of their media, of all callers
key_limiter      holds the requests of each key to its limits, over all gateways
key_limits         the limits, a request's cost, and the headers of answers
answer_usage       token usage of an answer
"""
