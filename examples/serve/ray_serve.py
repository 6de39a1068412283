"""`mass serve` on Ray Serve: replicas that share nothing, as many as the traffic needs.

Each replica loads the bundle by itself and gets requests when it is ready; one whose worker has failed is replaced.

    pip install 'massmerge[serve,ray]' 'ray[serve]'
    MASS_BUNDLE=/data/bundle MASS_KEY_FILE=/run/secrets/mass/key serve run ray_serve:service

`MASS_BUNDLE` is a path that every machine sees. Settings are read when this file is imported, on the machine that starts it.
"""

import os
from pathlib import Path

from fastapi import FastAPI
from ray import serve

from massmerge.serve.app import make_app
from massmerge.serve.settings import ServiceSettings, read_api_key

BUNDLE, KEY = Path(os.environ["MASS_BUNDLE"]), os.environ.get("MASS_KEY_FILE")
CORES = int(os.environ.get("MASS_CORES", "2"))
MOST = int(os.environ.get("MASS_REPLICAS", "8"))


@serve.deployment(
    ray_actor_options={"num_cpus": CORES},
    # A request that waits for a batch counts: two batches per replica, then there are more replicas.
    autoscaling_config={"min_replicas": 1, "max_replicas": MOST, "target_ongoing_requests": 64},
    max_ongoing_requests=256,
    health_check_period_s=10,
    health_check_timeout_s=120,
    graceful_shutdown_timeout_s=20,
)
@serve.ingress()
class Mass:
    """One replica."""

    def __init__(self, bundle: Path, key: bytes | None, cores: int) -> None:
        # Ray's proxy listens and takes requests from elsewhere, so a service that is reached has a key.
        self.settings = ServiceSettings(bundle=bundle, api_key=key, threads=cores)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application of `mass serve`."""
        return make_app(self.settings)

    async def check_health(self) -> None:
        """Wait until the bundle is loaded; fail where the service has failed."""
        service = self.app.state.service
        if service.loading is not None:
            await service.loading
        if service.failure is not None:
            raise service.failure


service = Mass.bind(BUNDLE, read_api_key(Path(KEY)) if KEY else None, CORES)
