"""Which callers are served, and the limits of what is served at once.

auth             checks an API key, and finds its caller
api_keys_file    the file of API keys, read at the start
callers          a caller's name and tenant, and the tenant's salt
request_limiter  bounds on requests, and on the bytes of their media
"""
