"""What connects the consumer, in EngineCore, to the store, the bus and the clock; each with its thread.

opening         open_consumer: the consumer with all its links.
readable_pins   ReadablePins: a pin counts only if its bytes can be read from here.
store_pins      StorePins: commands about pins, over the store session.
message_sender  BusMessageSender: decisions, acks and orders, over the bus.
alarm           Alarm: wakes the engine at a set time.
"""
