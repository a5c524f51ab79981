"""Every actor of the protocol in one process, its clock and its network in the test's hands.

config         the size of a world, its requests, its faults
world          the actors and every step of them
gateway, encoder, consumer, store    one real actor each, without vLLM
network        queues between them; flights: the single flight, script by script
stages         requests that one instance prefills and another decodes
transfers      several stores, and the agents that move entries between them
virtual_loop   an event loop whose time is a number
checks         the steps that can be taken now; what must hold after every step, and at the end
explore        every order of steps, within bounds; random_walk: orders drawn at random
fingerprint    equal for worlds that will behave alike
"""
