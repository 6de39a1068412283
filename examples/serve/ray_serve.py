"""A bundle behind Ray Serve: replicas on the machines of a cluster, as many as the requests under way ask for.

    pip install 'massmerge[serve,ray]' 'ray[serve]'
    serve run ray_serve:build bundle=/data/out api_key_file=/run/secrets/mass/key

A replica is `mass serve` without its own server: the same API, limits and page. It takes requests once its bundle is loaded.
"""

from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

from massmerge.serve.app import make_app
from massmerge.serve.service import Service
from massmerge.serve.settings import ServiceSettings, read_api_key


class Arguments(BaseModel):
    """What `serve run ray_serve:build NAME=VALUE …` takes."""

    bundle: Path
    """A folder that all machines see."""
    api_key_file: Path | None = None
    min_replicas: int = 2
    max_replicas: int = 16
    requests: int = 16
    """Requests under way for each replica; more of them and there are more replicas. They share batches of 32 inputs."""
    cores: float = 2.0
    """Of a replica, which computes with as many threads."""


async def refuse_unhealthy(service: Service) -> None:
    """Wait until the bundle is loaded; raise an error if it cannot be, or if nothing can be answered any more."""
    if service.loading is not None:
        await service.loading
    if service.failure is not None:
        raise service.failure


@serve.deployment(health_check_period_s=10, health_check_timeout_s=30, graceful_shutdown_timeout_s=20)
@serve.ingress()
class Replica:
    """One copy of the bundle with the application around it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, made where it runs: its threads and tensors belong to one process."""
        app = make_app(self._settings)
        self._service: Service = app.state.service
        return app

    async def check_health(self) -> None:
        """What Ray Serve asks before the first request and then every ten seconds; a replica that fails is replaced."""
        await refuse_unhealthy(self._service)


def build(arguments: Arguments) -> serve.Application:
    """The application that `serve run` starts."""
    settings = ServiceSettings(
        arguments.bundle.resolve(),
        api_key=None if arguments.api_key_file is None else read_api_key(arguments.api_key_file),
        threads=max(1, int(arguments.cores)),
        max_requests=4 * arguments.requests,
    )
    return Replica.options(
        ray_actor_options={"num_cpus": arguments.cores},
        max_ongoing_requests=2 * arguments.requests,
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": arguments.requests,
            "upscale_delay_s": 10,
            "downscale_delay_s": 300,  # a new replica takes as long as the bundle to load
        },
    ).bind(settings)
