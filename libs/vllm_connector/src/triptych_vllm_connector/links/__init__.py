"""What EngineCore talks to: store, bus, clock.

alarm          One thread that calls back at a set time: the engine's thread itself waits for input without a
inbox          What other threads leave for EngineCore's: the store session's and the bus's. No locks, no lost
links          What EngineCore talks to, as the consumer sees it: two narrow interfaces, testable without the
opening        The consumer with its links to store and bus, as an engine opens it. Without vLLM.
readable_pins  A pin counts only if its bytes can be read from here: checked before a request is scheduled wit
"""
