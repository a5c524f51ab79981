"""Models, fakes and machinery that tests share. mypy checks them strictly, unlike test modules.

fast/             the whole system as real processes without vLLM, with faults at any step
real/             the whole system with real engines, as `./triptych up` starts it
protocol_world/   all actors of the protocol in one process, every order of their steps explored
hostile/          images, options and files of a careless or hostile caller
gateway/          a real gateway between a fake encoder and a fake prefill_decode
encoder/          an encoder's jobs around a fake engine and a fake store
vllm_connector/   the connector's consumer, schedulers and workers in a test's hands
stores            a cache_store as a child process, its core alone, a log of pushes
fabric/           stores with a fabric agent each, and the gateway that orders transfers
faults/           between processes: cut, slow and reset connections, failover, processes that run slowly
cuda/             a fake GPU; why there is no real one here
debian_packages   Debian's packages, unpacked for the tests: Prometheus, a Chromium
kubernetes/       rendered manifests, and the rules that each pod keeps
vllm_seams/       what the project uses of vLLM, against any version's source
protocol_steps    steps of the protocol, for faults and for the documents
message_samples   one of each message
examples          hypothesis profiles
check, layers     `./triptych check` and `./triptych test`
waiting           waits: in an event loop, and for other processes; free ports
leftovers         what must not be in the store at rest
flight_model      stands in for the single flight in Redis
"""
