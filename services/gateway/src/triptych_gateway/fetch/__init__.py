"""Media that a request names by URL, fetched from servers that are not trusted.

fetcher          one item: checked, fetched or read, with span, metrics and error
fetch_rules         which URLs, hosts and addresses are allowed; pure
shared_downloads one download per URL and tenant, however many requests want it; owns the tasks
downloader       one URL over all its redirects, each by all rules, within all bounds
client           the HTTP client: no connection to an address that is not allowed
response_cache   answers that may be used again, bounded in bytes, each for one tenant
failures         reasons of failed fetches, and errors for callers

A URL is checked when the request is taken, and again at each redirect. An address is checked when a name is
looked up for a connection, and again when the socket is made for it: what was looked up before never counts.
"""
