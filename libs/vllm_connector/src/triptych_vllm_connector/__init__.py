"""Code that Triptych adds to vLLM through vLLM's own options (`host.engine_options` builds them).

host/           host processes: engine options, namespace, what the machine offers.
grammars/       hosts and EngineCore of prefill_decode: structured outputs are compiled where it can be ended.
records/        host processes: what a renderer makes of an item, recorded and replayed.
decoding/       host processes and their children: media are decoded where a decoder can be ended.
plugin          every process of vLLM: the six changes for which vLLM has no option.
connector       EngineCore and workers: the one object that vLLM makes in each; the host's metrics.
plain/          EngineCore and workers of engines that users start with vLLM alone: another connector.
versions        the versions of vLLM that are supported, and the installed one.
seams/          every process: what differs between them, and how parts of vLLM are replaced.
config          the connector's options, in every process.
scheduler/      EngineCore: vLLM's hooks: schedulers that park, encoder cache managers.
consumer/       EngineCore of prefill_decode: which requests may run, and what they hold.
links/          EngineCore of prefill_decode: the consumer's links to store, bus and clock.
readable        EngineCore and workers: which entries can be read from here; keys of tensors in Redis.
slab_probe      EngineCore and workers: what the engine knows of the store's slab, which a worker finds out.
kv_failures     EngineCore -> host: why a decode instance could not go on from a KV cache.
step_orders     EngineCore -> worker: what to write and what to load.
pieces          hosts, EngineCore and workers: items that are several features in the prompt.
step_metadata   both ways, as vLLM's connector metadata: step orders, and what became of loads back.
engine_counters EngineCore -> host: what is counted, and the list of these metrics.
worker/         workers: write and seal, load and release; the transports.
process_exit    EngineCore and workers: signals, and a quick end.
"""
