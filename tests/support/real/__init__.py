"""The whole system with real engines on the CPU, as `./triptych up` leaves it running.

system          starts it, and a monolithic vLLM beside it; requests, logs, traces
answers         answers of two servers, compared as JSON
adapters        LoRA adapters with random weights
engine_options  options of vLLM's own that features need, all in one engine
questions       questions to the demo model, with the monolith's answers
balancer        requests over several gateways, and a steady load
gateways        one more gateway beside those that it has, with settings of its own
joining         engines that join it, each started by hand; and a system that has no others
processes       signals to the processes of a service
roles           instances asked directly, at their own ports
inspection      what the system holds, and whether it is whole
warm            processes that are forked from one which has imported vLLM
text_models     a classifier with random weights
weights         the demo model with other weights
batches         a program: the answers of one engine to batches of requests with sampling fields
ask_worker      a process: an encoder's engine whose host asks its worker for the store's slab
"""
