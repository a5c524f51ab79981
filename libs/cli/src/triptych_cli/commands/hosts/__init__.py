"""What the commands know of several hosts.

host_report   the hosts, their stores and links, from the records of the registry (pure)
moves         which entries of a store go where, when its host is drained (pure)
mover         has fabric agents move them, and waits for what comes of it
"""
