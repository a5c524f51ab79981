"""GET /health/live, /health/ready and /metrics."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from triptych_common.coordination import Registration
from triptych_common.telemetry.metrics import CONTENT_TYPE
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.encode.stream_lags import StreamLags
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.routing.registry_view import RegistryView


def health_routes(
    view: RegistryView,
    registration: Registration,
    limiter: RequestLimiter,
    metrics: GatewayMetrics,
    stream_lags: StreamLags,
) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready")
    async def ready() -> Response:
        """Ready: an instance serves. Text requests need neither Redis nor an encoder: a balancer that took
        out every gateway because Redis is away would end those, too."""
        is_draining = registration.record.draining
        is_ready = bool(view.serving) and not is_draining
        report = {
            "status": "ready" if is_ready else "not ready",
            "redis": view.is_fresh,
            "draining": is_draining,
            "encoder_available": bool(view.encoding),
            "num_requests": limiter.num_requests,
            "instances": [
                {
                    "instance": r.instance,
                    "role": r.role,
                    "model": r.model,
                    "draining": r.draining,
                    "namespace_digest": r.namespace_digest,
                    "transports": r.transports,
                    "device": r.device,
                    "slab_failure": r.slab_failure,
                }
                for r in view.records
            ],
        }
        return Response(
            orjson.dumps(report), status_code=200 if is_ready else 503, media_type="application/json"
        )

    @router.get("/metrics")
    async def metrics_text() -> Response:
        await stream_lags.measure()
        return Response(metrics.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router
