"""Routes /health and /ping, as in vLLM's server; /health/live, /health/ready, /version and /metrics."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from triptych_common import release
from triptych_common.telemetry.metrics import CONTENT_TYPE
from triptych_gateway.endpoints.local_endpoints import HEALTH, LIVE, METRICS, PING, READY, VERSION
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.local import add_route


def health_routes(gateway: Gateway) -> APIRouter:
    router, view, registration = APIRouter(), gateway.view, gateway.registration

    def is_ready() -> bool:
        """Return whether an instance serves. Text requests need neither Redis nor an encoder: a balancer that
        removed every gateway because Redis is away would end those too."""
        return bool(view.serving) and not registration.record.draining

    async def health() -> Response:
        return Response(status_code=200 if is_ready() else 503)

    async def live() -> dict[str, str]:
        return {"status": "live"}

    async def ready() -> Response:
        serves = is_ready()
        report = {
            "status": "ready" if serves else "not ready",
            "redis": view.is_fresh,
            "draining": registration.record.draining,
            "encoder_available": bool(view.encoding),
            "num_requests": gateway.services.access.limiter.num_requests,
            "instances": [
                {
                    "instance": r.instance,
                    "role": r.role,
                    "model": r.model,
                    # The adapters' names may tell of tenants, and no key is asked for.
                    "num_adapters": len(r.adapters),
                    "draining": r.draining,
                    "release": r.release,
                    "namespace_digest": r.namespace_digest,
                    "transports": r.transports,
                    "device": r.device,
                    "slab_failure": r.slab_failure,
                    "unserved_modalities": {str(each): why for each, why in r.unserved_modalities.items()},
                }
                for r in view.records
            ],
        }
        return Response(
            orjson.dumps(report), status_code=200 if serves else 503, media_type="application/json"
        )

    async def metrics_text() -> Response:
        gateway.waiting_work.measure()
        await gateway.stream_lags.measure()
        return Response(gateway.services.metrics.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def show_version() -> dict[str, str]:
        return {"version": release()}

    add_route(router, HEALTH, health)
    add_route(router, PING, health)
    add_route(router, LIVE, live)
    add_route(router, READY, ready)
    add_route(router, METRICS, metrics_text)
    add_route(router, VERSION, show_version)
    return router
