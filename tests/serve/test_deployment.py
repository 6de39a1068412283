"""The files in examples/serve fit together, and fit the command."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import massmerge
from massmerge.cli.serve import serve

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "examples" / "serve" / "kubernetes.yml"


def objects():
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def faults(one):
    """What the schemas of Kubernetes find wrong with an object."""
    try:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("one", objects(), ids=lambda one: one["kind"])
def test_every_object_is_as_the_schemas_of_kubernetes_say(one):
    assert faults(one) == []


def test_the_schemas_find_a_misspelt_field():
    scaler = next(one for one in objects() if one["kind"] == "HorizontalPodAutoscaler")
    scaler["spec"]["maxReplica"] = scaler["spec"].pop("maxReplicas")
    assert "maxReplica" in faults(scaler)[0]


def test_the_autoscaler_watches_what_the_deployment_asks_for():
    by_kind = {one["kind"]: one for one in objects()}
    deployment, scaler = by_kind["Deployment"], by_kind["HorizontalPodAutoscaler"]
    named = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["apiVersion"] == "autoscaling/v2" and scaler["spec"]["scaleTargetRef"] == named
    assert 1 < scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]
    assert "replicas" not in deployment["spec"]  # or each update of the deployment would undo what the scaler did
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    watched = {metric["resource"]["name"] for metric in scaler["spec"]["metrics"]}
    assert watched <= set(container["resources"]["requests"])  # a share of nothing is not known


def test_the_deployments_arguments_are_options_of_the_command():
    (container,) = yaml.safe_load_all(KUBERNETES.read_text()).__next__()["spec"]["template"]["spec"]["containers"]
    known = {name for option in serve.params for name in option.opts}
    assert {text for text in container["args"] if text.startswith("--")} <= known


def test_the_image_installs_this_version_and_the_torch_that_is_tested():
    lines = (ROOT / "examples" / "serve" / "Dockerfile").read_text()
    torch = next(x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.startswith("torch=="))
    assert f"'massmerge[serve]=={massmerge.__version__}'" in lines and f" {torch} " in lines
