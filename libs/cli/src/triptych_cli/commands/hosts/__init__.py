"""Commands for several hosts.

host_report   the hosts, their stores and links, from the records of the registry (pure)
mover         plans which entries of a store go where at a drain, and has fabric agents move them
"""
