"""prefill_decode service: vLLM's own OpenAI server in this process, on an engine of a language model.

`TRIPTYCH_ROLE` selects its stages of a request: prefill and decode, or one of them, and encode if it has a
vision tower. All of this runs in the host process; `triptych_vllm_connector` runs inside vLLM's processes:
`consumer/` decides which requests may run, `scheduler/` parks and wakes them, `worker/` loads tensors.

__main__       the command; settings are refused before vLLM is imported
settings       `TRIPTYCH_*`
service        the life of the process: startup, main loop, drain
warm_up        work before the instance registers: the first steps of an engine are slow
http_server    vLLM's application behind uvicorn: when it listens, and how it drains
engine_health  detects an engine that hangs; 503 or a broken connection for one that is dead
request_guards  bounds in vLLM's own code: texts of errors, tables of its GPU runner
kv_errors      503 of a decode instance that cannot get a prompt's KV cache
"""
