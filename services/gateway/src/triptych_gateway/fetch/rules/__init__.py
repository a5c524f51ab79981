"""Rules for URLs that may be fetched. Pure: no I/O, no clock.

urls        a URL in one normal form, checked; what a redirect leads to
hosts       a host in one normal form, and the lists of hosts that are allowed or denied
addresses   which IP addresses may be connected to
"""
