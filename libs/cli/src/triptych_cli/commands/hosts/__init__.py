"""Commands for several hosts.

host_report   the hosts, their stores and links, from the records of the registry (pure)
moves         plan of a drain: which entries of a store go where (pure)
mover         orders the moves from fabric agents and waits for their results
"""
