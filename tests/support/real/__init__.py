"""The whole system with real engines on the CPU, as `./triptych up` leaves it running.

system       starts it, and a monolithic vLLM beside it; requests, logs, traces
answers      answers of two servers, compared as JSON
questions    questions to the demo model, with the monolith's answers
balancer     requests over several gateways, and a steady load
gateways     one more gateway beside those that it has, with settings of its own
processes    signals to the processes of a service
inspection   what the system holds, and whether it is whole
ask_worker   a process: an encoder's engine whose host asks its worker for the store's slab
"""
