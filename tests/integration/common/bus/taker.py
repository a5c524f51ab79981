"""A reader of one stream in a process of its own, to be stopped by signals: prints each job id."""

import asyncio
import sys

from tests.integration.common.samples import STREAM
from triptych_common.bus import AsyncBus
from triptych_common.protocol.messages import EncodeCompleted


async def main(url: str) -> None:
    async with (
        await AsyncBus.connect(url, "test", client_name="taker") as bus,
        bus.consumer(STREAM, group="g", consumer="c", prefetch=64) as consumer,
    ):
        async for delivery in consumer:
            await delivery.ack()
            assert isinstance(delivery.envelope.message, EncodeCompleted)
            sys.stdout.write(delivery.envelope.message.job_id + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
