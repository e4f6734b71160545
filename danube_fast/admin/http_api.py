"""The HTTP application of the admin port.

GET /healthz   200 while the coordinator's loop turns, else 503
GET /readyz    200 when every process is ready and syncs of logs succeed, else 503 and what is not
GET /metrics   counters of all processes, topics and subscriptions for Prometheus; each answer tells
               workers, in shared memory, to look at their topics for the next one

With a guard (guard.py) the first two say up or not and no more to all who ask.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from danube_fast.admin import metrics
from danube_fast.admin.guard import Guard, Guarded, may_see_details
from danube_fast.admin.view import BrokerView
from danube_fast.ring.counters import Counter

__all__ = ["create_app"]

UNAVAILABLE = 503
OK = 200


def create_app(view: BrokerView, guard: Guard | None = None) -> ASGIApp:
    """The application over a broker's shared memory; without a guard all may ask for everything."""

    async def healthz(request: Request) -> Response:
        healthy = view.is_healthy()
        text = "ok" if healthy else "the coordinator's loop does not turn"
        return JSONResponse({"status": text}, OK if healthy else UNAVAILABLE)

    async def readyz(request: Request) -> Response:
        unready, unwritable = view.unready(), view.unwritable()
        status = "ready"
        if unready or unwritable:
            status = "not ready" if unready else "not ready for writes: syncs of logs fail"
        told: dict[str, Any] = {"status": status}
        if await may_see_details(guard, request):
            missing = (name for name in unwritable if name not in unready)
            told["waiting_for"] = [*unready, *missing]
            told["processes"] = msgspec.to_builtins(view.processes())
        return JSONResponse(told, OK if status == "ready" else UNAVAILABLE)

    async def scrape(request: Request) -> Response:
        view.counters.add(Counter.SCRAPES)
        return Response(metrics.render(view), media_type=metrics.CONTENT_TYPE)

    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", scrape),
        ]
    )
    return app if guard is None else Guarded(app, guard)
