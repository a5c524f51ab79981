"""The store's logic against a model, step by random step (hypothesis).

store_world     the model: clients, their leases and pins, what must hold after every step
store_machine   the rules
"""
