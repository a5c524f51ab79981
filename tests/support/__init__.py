"""What tests share: models, fakes and machinery. Type-checked (`mypy tests/support`).

fast/             the whole system as real processes without vLLM, with faults at any step
real/             the whole system with real engines, as `./triptych up` starts it
protocol_world/   all actors of the protocol in one process, every order of their steps explored
hostile/          images, options and files of a careless or hostile caller
faults/           between processes: a TCP proxy that cuts and delays, processes that run slowly
cuda/             why there is no GPU here, and the producer of the tests on one
unchecked/        on an encoder's path: switches its check of items off
waiting           waits for other processes, and free ports

one class of the product in a test's hands
  store_machine   the store's logic against a model (hypothesis)
  inflight_model  stands in for the single flight in Redis
  leftovers       what must not be in the store at rest
  fake_engine     vLLM's requests, the store and the bus around the connector's consumer
  played_engine, scheduled    the consumer with all of its surroundings played by the test
  consumer_world, consumer_scheduler, consumer_neighbours, consumer_checks    the consumer in a model
                  of its surroundings: the world, its scheduler, its store and bus, what must hold
  parking_engine  EngineCore's loop over vLLM's schedulers with parking in front
  fake_cuda       a GPU in host memory
  redis_pair      a primary, its replica and a sentinel
  resets          connections that their peer resets
"""
