"""How the supervisor asks who is registered while it waits for an engine."""

import redis

from tests.conftest import EmbeddedRedis
from triptych_cli.supervisor.readiness import RegistryReader


async def test_the_reader_keeps_its_connection_and_survives_its_loss(own_redis: EmbeddedRedis) -> None:
    async with RegistryReader(own_redis.url, "default") as reader:
        assert await reader.list_instances() == []
        with redis.Redis.from_url(own_redis.url) as client:
            before = client.info("stats")["total_connections_received"]
            assert await reader.list_instances() == []
            assert client.info("stats")["total_connections_received"] == before
        own_redis.stop()
        assert await reader.list_instances() is None
        own_redis.start()
        assert await reader.list_instances() == []
