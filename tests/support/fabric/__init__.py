"""Stores with a fabric agent each, as processes, and a gateway in the test's hands.

agent_process  an agent as a child process, and the fabric's key
authority     certificates of agents
fabric_host   a store, its agent and transports, and a session that encodes or consumes there
orders        the gateway: sends orders, and waits for what comes of them
"""
