"""Encoder service: a vLLM engine that runs only the encoder, fed from the jobs of its namespace.

All of it runs in the host process; what runs inside vLLM's processes is in `triptych_vllm_connector`.

__main__        the command; settings are refused before vLLM is imported
settings        `TRIPTYCH_*`
service         the life of the process: startup, main loop, drain
jobs/           one encode job from the stream to its results, and the pins until the final acks
preprocessing/  from a job's media to an item that the vision tower takes
store/          the store: transports, reservations, the session
engine/         vLLM
metrics         what is counted and timed; the host answers Prometheus with it, where that is set
host_threads    a lower priority, and off other engines' cores, where the encoder shares cores with text
encoding        the protocol of an engine that encodes, its errors and limits: jobs need no vLLM
"""
