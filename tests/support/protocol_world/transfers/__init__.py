"""Several stores in the model of the protocol: entries go from one to another, by agents that gateways order.

wires     connections between agents, and the threads that carry them: played
agent     an agent: the real one but for sockets, threads, Redis and the registry
gateway   the real `TransferOrders` with all behind it; the directory of entries is played
world     the steps of all of them, what may go wrong with agents and between them, and what must hold
prints    their part of a fingerprint
"""
