"""The connector for plain vLLM: stock scheduler, the cache store, and neither gateway nor Redis of ours.

connector      PlainECConnector: the object that vLLM makes in EngineCore and in each worker, and calls;
               PlainOptions: its `ec_connector_extra_config`; PlainStep: a step's loads and saves.
wanted_items   EngineCore: which items of vLLM's requests are pinned, and which requests cannot get theirs.
store_pins     EngineCore: pins, by calls to the store that are bounded in time.
plain_worker   workers: loads pinned tensors, saves encoder outputs.
bounded_calls  both: a call that takes too long is given up, and what its answer brings is given back.
reopened       both: what has a session with the store, opened again when that is over.
"""
