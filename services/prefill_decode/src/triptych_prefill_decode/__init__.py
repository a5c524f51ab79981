"""prefill_decode service: vLLM's own OpenAI server in this process, on an engine of a language model.

`TRIPTYCH_ROLE` says which stages of a request it does: prefill and decode, one of them, and it encodes where
it has a vision tower. All of this runs in the host process; what
runs inside vLLM's processes is in `triptych_vllm_connector`: `consumer/` decides which requests may run,
`scheduler/` parks and wakes them, `worker/` loads tensors.

__main__       the command; settings are refused before vLLM is imported
settings       `TRIPTYCH_*`
service        the life of the process: startup, main loop, drain
warm_up        work before the instance registers: the first steps of an engine are slow
adapters       LoRA adapters, by whose names clients ask: in the instance's record
http_server    vLLM's application behind uvicorn: when it listens, and how it drains
request_guards  bounds in vLLM's own code: texts of errors, tables of its GPU runner
kv_errors      answers of an instance that decodes, where a prompt's KV cache is not to be had: 503
serving_load   what the engine has in hand: in the instance's record, with each heartbeat
engine_health  detects an engine that hangs; 503 or a broken connection for one that is dead
"""
