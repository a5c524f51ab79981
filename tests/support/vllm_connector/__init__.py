"""The connector's consumer, schedulers and workers in a test's hands.

fake_engine          vLLM's requests, the store and the bus around the consumer
played_engine        all of the consumer's surroundings, played by the test
parking_engine       EngineCore's loop over vLLM's schedulers with parking in front
parking_worker       the worker of that engine
fake_store_worker    a store session for a worker of vLLM's
gpu_worker           a fake GPU and its transports for such a worker
made_up_h100         a GPU that vLLM finds and that is not there
resolved_on_h100     a process that prints what vLLM makes of Triptych's options there
"""
