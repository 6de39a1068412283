"""Merges on a Ray cluster: the same bytes as here, whatever happens to its machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import massmerge.merging.run
import massmerge.merging.units
from clusters import TESTS, add_node
from engine_jobs import Writing
from killing_job import KillingMerge
from massmerge import InputError, MassError, add, merge
from massmerge.engines import ray as ray_engine
from massmerge.engines.choose import opened_engine
from massmerge.engines.ray import RayEngine
from massmerge.engines.unit import Unit
from massmerge.merging.run import Silent
from models import contents, write_family, write_recipe
from remote import serving

pytestmark = pytest.mark.xdist_group("ray")  # one cluster


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", {"red": 2, "green": 3, "blue": 2})
    return folder


@pytest.fixture
def engine(cluster, monkeypatch) -> RayEngine:
    monkeypatch.setattr(ray_engine, "OVERHEAD", 0.0)  # a unit per tensor, however small
    return RayEngine()


class Heard(Silent):
    """What one bar would show."""

    def __init__(self) -> None:
        self.total, self.tensors = 0, []

    def start(self, total: int, done: int) -> None:
        self.total, self.tensors = total, []

    def tensor(self, name: str) -> None:
        self.tensors.append(name)


@pytest.mark.parametrize("options", [{}, {"method": "ties"}, {"max_shard_size": "20KB"}], ids=str)
def test_a_merge_on_a_cluster_has_the_same_bytes_and_one_bar(family, tmp_path, engine, monkeypatch, options):
    recipe, progress = write_recipe(family, ["red", "green", "blue"], name="same.yaml", **options), Heard()
    here = contents(merge(recipe, tmp_path / "here", workers=1))
    monkeypatch.setattr(massmerge.merging.units, "SPLIT", 0.0)
    assert contents(merge(recipe, tmp_path / "there", engine=engine, progress=progress)) == here
    assert len(progress.tensors) == len(set(progress.tensors)) == progress.total > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_a_cluster_merges_from_a_store_that_refuses_reads(family, tmp_path, engine, monkeypatch):
    """Every third request is refused once, in whatever process it is made."""
    monkeypatch.setenv("MASS_CACHE", str(tmp_path / "cache"))
    tasks = ["red", "green"]
    with serving(family) as (address, store):
        named = {"base": f"{address}/base", "tasks": [{"name": t, "expert": f"{address}/{t}"} for t in tasks]}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(named))
        merge(tmp_path / "recipe.yaml", tmp_path / "there", engine=engine)
        before = len(store.asked)
        here = contents(merge(tmp_path / "recipe.yaml", tmp_path / "here", workers=1))
    assert contents(tmp_path / "there") == here
    assert before > 60, "a third of so many requests"


def test_tasks_added_on_a_cluster_have_the_same_bytes(family, tmp_path, engine):
    bundle = merge(write_recipe(family, ["red", "green"], name="two.yaml"), tmp_path / "two", workers=1)
    for name, where in (("here", "local"), ("there", engine)):
        add(bundle, {"blue": family / "blue"}, out=tmp_path / name, engine=where)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_wrong_input_on_a_worker_stops_the_merge_with_the_same_words(tmp_path, engine):
    import torch
    from safetensors.torch import load_file, save_file

    recipe = write_family(tmp_path, "bert", {"red": 2})
    path = tmp_path / "red" / "model.safetensors"
    tensors = load_file(path)
    tensors[next(name for name in tensors if name.endswith("query.weight"))][0, 0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"task red .*query\.weight holds NaN"):
        merge(recipe, tmp_path / "out", engine=engine)


def test_a_machine_that_dies_in_the_middle_of_a_write_changes_nothing(family, tmp_path, engine, cluster, monkeypatch):
    recipe, doomed = family / "recipe.yaml", add_node(cluster)
    monkeypatch.setenv("DOOMED_NODE", doomed.node_id)
    monkeypatch.setattr(massmerge.merging.run, "MergeJob", KillingMerge)
    killed = []
    real = engine._weigh
    monkeypatch.setattr(engine, "_weigh", lambda unit, found, faults: killed.append(found) or real(unit, found, faults))
    merge(recipe, tmp_path / "there", engine=engine)
    cluster.remove_node(doomed, allow_graceful=False)
    assert killed and doomed.node_id[:8] in killed[0].worker
    assert contents(tmp_path / "there") == contents(merge(recipe, tmp_path / "here", workers=1))


def test_machines_with_another_version_get_no_work(family, tmp_path, engine, cluster, monkeypatch):
    other = tmp_path / "other" / "massmerge"
    other.mkdir(parents=True)
    for path in (TESTS.parent / "src" / "massmerge").iterdir():
        if path.name == "__init__.py":
            (other / path.name).write_text(path.read_text().replace('__version__ = "', '__version__ = "9.'))
        else:
            (other / path.name).symlink_to(path)
    node = add_node(cluster, env_vars={"PYTHONPATH": f"{other.parent}{os.pathsep}{TESTS}"})
    refused = []
    real = engine._weigh
    monkeypatch.setattr(
        engine, "_weigh", lambda unit, found, faults: refused.append(found) or real(unit, found, faults)
    )
    there, placed = NodeAffinitySchedulingStrategy(node.node_id, soft=False), engine._placed

    def first_there(unit, faults):  # it would come too late for a unit by itself: its workers have yet to import torch
        return placed(unit, faults) if faults.refused else {"scheduling_strategy": there}

    monkeypatch.setattr(engine, "_placed", first_there)
    try:
        merge(family / "recipe.yaml", tmp_path / "there", engine=engine)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    assert {found.place for found in refused} == {node.node_id} and "massmerge 9." in refused[0].message
    assert contents(tmp_path / "there") == contents(merge(family / "recipe.yaml", tmp_path / "here", workers=1))


_DRIVER = """
import os, signal, sys
import massmerge.engines.ray
from massmerge import merge
from massmerge.merging.run import Silent

class Dying(Silent):
    seen = 0
    def tensor(self, name):
        self.seen += 1
        if self.seen == 5:
            os.kill(os.getpid(), signal.SIGKILL)

massmerge.engines.ray.OVERHEAD = 0.0
merge(sys.argv[1], sys.argv[2], engine="ray", progress=Dying())
"""


class Counting(Silent):
    done = 0

    def start(self, total: int, done: int) -> None:
        self.done = done


def test_a_driver_that_is_killed_goes_on_where_it_was(family, tmp_path, engine, cluster):
    recipe, out, progress = family / "recipe.yaml", tmp_path / "there", Counting()
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    killed = subprocess.run([sys.executable, "-c", _DRIVER, recipe, out], env=environment, timeout=300)
    assert killed.returncode == -9 and not out.exists()
    merge(recipe, out, engine=engine, progress=progress)
    assert progress.done >= 5
    assert contents(out) == contents(merge(recipe, tmp_path / "here", workers=1))


def failing(engine: RayEngine, folder: Path, data: object) -> MassError:
    """What is said of a unit that fails, beside one that does not."""
    with pytest.raises(MassError) as error:
        engine.run(Writing(folder), [Unit("good", seconds=9), Unit("bad", data=data)], lambda unit, result: None)
    return error.value


@pytest.mark.parametrize("data", ["disk", "die"])
def test_after_three_repetitions_the_error_names_unit_and_machine(tmp_path, engine, data):
    said = str(failing(engine, tmp_path, data))
    assert "bad: failed 4 times, the last time on " in said and "process" in said and "resume" in said
    assert len(list(tmp_path.glob("bad.attempt*"))) == 4
    assert (tmp_path / "good").exists()


@pytest.mark.parametrize(("data", "words"), [("input", "the recipe is wrong"), ("bug", "ZeroDivisionError: division")])
def test_what_no_repetition_mends_is_not_repeated(tmp_path, engine, data, words):
    assert words in str(failing(engine, tmp_path, data))
    assert len(list(tmp_path.glob("bad.attempt*"))) == 1


def test_a_disk_that_fails_once_is_not_noticed(tmp_path, engine):
    told = []
    engine.run(Writing(tmp_path), [Unit("u", data=("disk once", 1))], lambda unit, result: told.append(result))
    assert told == ["U"] and len(list(tmp_path.glob("u.attempt*"))) == 2


def test_two_writers_of_one_unit_leave_one_file(family, tmp_path, engine):
    """As after a driver was taken for dead: every unit of a merge is done by two workers."""
    real, doubled = engine.run, []

    class Twice:
        overhead = 0.0

        def run(self, job, units, done):
            twins = [Unit(f"{unit.key} again", unit.memory, unit.seconds, unit.after, unit.data) for unit in units]
            doubled.extend(twins)
            real(job, [one for pair in zip(units, twins, strict=True) for one in pair], done)

        def close(self):
            pass

    class Seen(Silent):
        def phase(self, name: str) -> None:
            files = sorted(path.name for path in (tmp_path / ".there.partial" / "parts").iterdir())
            assert len({name.partition("-")[0] for name in files}) == len(files) > 10
            assert not any(name.endswith((".draft", ".claim")) for name in files)

    merge(family / "recipe.yaml", tmp_path / "there", engine=Twice(), progress=Seen())
    assert len(doubled) > 10
    assert contents(tmp_path / "there") == contents(merge(family / "recipe.yaml", tmp_path / "here", workers=1))


def test_no_cluster_is_told_with_a_remedy(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(InputError, match=r"no cluster on this machine .* Start one with `ray start --head`"),
        opened_engine("ray"),
    ):
        pass
