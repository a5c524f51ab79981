"""Links of the consumer in EngineCore to the store, the bus and the clock, each with its own thread.

opening         open_consumer: the consumer with all its links: the sender on the bus, the timer thread.
readable_pins   ReadablePins: a pin counts only if its bytes can be read from here.
"""
