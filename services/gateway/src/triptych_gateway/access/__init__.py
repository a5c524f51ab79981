"""Which callers are served, and how much at once.

auth             an API key, checked: whose it is
api_keys_file    the file of API keys, read at the start
callers          a caller's name and tenant, and the tenant's salt
request_limiter  bounds on requests, and on the bytes of their media
"""
