"""Access: which callers are served, and limits of requests at once and per caller.

auth             checks an API key, and finds its caller
api_keys_file    the file of API keys; `api_keys_watch` reads it again when it changes
callers          a caller's name, tenant and limits, and the tenant's salt
request_limiter  bounds on requests, and on the bytes of their media, of all callers
key_limiter      holds the requests of each key to its limits, over all gateways
key_limits         the limits, a request's cost, and the headers of answers
answer_usage       token usage of an answer
cors             web pages that may call the API
"""
