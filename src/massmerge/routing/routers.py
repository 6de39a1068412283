"""Every router, under the name that recipes and commands know it by. A new one is one file, and one line here."""

from __future__ import annotations

from massmerge.errors import InputError
from massmerge.routing.adapted import ADAPTED, Adapted
from massmerge.routing.linear import Linear
from massmerge.routing.mlp import MlpRouter
from massmerge.routing.nearest import NearestRouter
from massmerge.routing.per_voter import PerVoter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import PrototypeRouter
from massmerge.routing.router import RouterKind
from massmerge.routing.tuned import TUNED, TunedKind

ROUTERS: dict[str, RouterKind] = {
    "projection": PerVoter(ProjectionRouter),
    "prototype": PerVoter(PrototypeRouter),
    "linear": Linear(),
    "nearest": PerVoter(NearestRouter),
    "mlp": PerVoter(MlpRouter),
    TUNED: TunedKind(),
    ADAPTED: Adapted(),
}
FITTED = [name for name, router in ROUTERS.items() if router.needs_fit and router.needs_names]
"""Those that `mass calibrate` fits."""


def find_router(kind: str) -> RouterKind:
    """The router of a name.

    Raises:
        InputError: there is none.
    """
    if kind not in ROUTERS:
        *names, last = ROUTERS
        raise InputError(f"no router {kind!r}. Choose from {', '.join(names)} and {last}.")
    return ROUTERS[kind]
