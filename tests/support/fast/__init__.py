"""The whole system as real processes, without vLLM: fast enough to kill it thousands of times.

real:   Redis, cache_store, gateways, the encoder's and prefill_decode's sides of the protocol
        (jobs, reservations, workers, preallocation, pins), shared memory, HTTP, signals
faked:  vLLM. The encode engine makes a tensor from the media's bytes, the decode engine makes an answer
        from the bytes of its tensors, so a wrong tensor is a wrong answer

system      starts everything, restarts what dies, lists what is left over; layout: how many of what
client      sends requests, and separates right answers, documented errors and everything else
prompts     the questions and their right answers
load        callers that never stop
scenario    questions of every kind, and a fault in the middle of them; case: its outcome and judgement
faults      kill, stop and slow down, at any step of `tests.support.protocol_steps`
redis_inspection    what is in Redis, read without taking part
processes/  what runs in the forked processes
"""
