"""The kit brings what a machine with a GPU and PyTorch lacks to run Triptych: no package index, no vLLM.

build         gathers it in a folder: wheels, and vLLM's Python
vllm_python   vLLM without its compiled parts, with stand-ins for those it imports at once
figures       times of spans, out of the traces that a run kept
on_machine.sh sets it up beside the machine's own PyTorch, and runs one tier of tests
requirements.txt  what such a machine lacks; its versions are constraints.txt's
"""
