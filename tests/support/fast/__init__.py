"""The whole system as real processes, without vLLM: fast enough to kill it thousands of times.

real:   Redis, cache_store, gateways, the encoder's and prefill_decode's sides of the protocol
        (jobs, reservations, workers, preallocation, pins), shared memory, HTTP, signals
stood in for: vLLM. `encode_engine` makes a tensor from the media's bytes, `decode_engine` makes an
        answer from the bytes of the tensors that it was given, so a wrong tensor is a wrong answer

system     starts everything, restarts what dies, says what is left over
client     asks, and tells right answers, documented errors and everything else apart
scenario   questions of every kind, and a fault in the middle of them
case       what came of it, and how it is judged
faults     kill, stop and slow down, at any step of `triptych_common.protocol.steps`
points     inside the processes: where the steps are noticed
"""
