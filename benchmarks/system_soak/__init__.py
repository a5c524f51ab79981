"""Parts of `soak_system.py`.

target          a system under load as the soak sees it: its faults, its health, what is left of requests
fast, real      the two targets: engines without vLLM, and vLLM on the CPU
fault_injector  one fault after the other, each when the system is healthy again
report          runs load and faults; the report and its judgement
"""
