"""GET /health/live, /health/ready and /metrics."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from triptych_common.telemetry.metrics import CONTENT_TYPE
from triptych_gateway.gateway import Gateway


def health_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready")
    async def ready() -> Response:
        """Ready: somebody serves. Text requests need neither Redis nor an encoder: a balancer that took
        out every gateway because Redis is away would end those, too."""
        view = gateway.view
        is_ready = bool(view.serving) and not gateway.is_draining
        report = {
            "status": "ready" if is_ready else "not ready",
            "redis": view.is_fresh,
            "draining": gateway.is_draining,
            "encoder_available": bool(view.encoding),
            "num_requests": gateway.admission.num_requests,
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
    async def metrics() -> Response:
        return Response(gateway.metrics.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router
