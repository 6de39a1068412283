"""The tasks' subspaces at sites."""

import massmerge
from massmerge.model.route import bases as module
from massmerge.model.route.bases import SiteBases
from massmerge.routing.separation import separation
from models import family_bundle


def test_a_subspace_is_made_once_for_all_who_ask(root, monkeypatch):
    model = massmerge.load(family_bundle(root, "bert"))
    made, own = [], module.site_basis
    monkeypatch.setattr(module, "site_basis", lambda *given: made.append(given) or own(*given))
    bases, site = SiteBases(model.sets.tensors), model.sites[0]
    tasks = range(len(model.tasks))
    found = bases.separation([site])
    assert len(made) == len(set(model.sets.tensors.targets))
    rows = bases.common([*tasks], site)
    assert len(made) == len(model.tasks)
    expected = separation([[rows[task] for task in dict.fromkeys(model.sets.tensors.targets)]])
    assert found.overlap.equal(expected.overlap) and found.chance.equal(expected.chance)


def test_how_tasks_lie_at_several_sites_is_the_mean(root):
    model = massmerge.load(family_bundle(root, "bert"))
    bases, sites = SiteBases(model.sets.tensors), model.sites[:2]
    each = [bases.separation([site]).overlap for site in sites]
    assert bases.separation(sites).overlap.equal((each[0] + each[1]) / 2)
