"""Units: their order, what each is given, and how a merge is cut into them."""

import time

import pytest

import massmerge.merging.units
from engine_jobs import Writing
from massmerge import MassError, merge
from massmerge.bundle.parts import tensor_key
from massmerge.engines.choose import opened_engine
from massmerge.engines.local import LocalEngine
from massmerge.engines.unit import Schedule, Unit
from massmerge.engines.worker import Parcel, carry_out
from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.units import Combine, MakeParts, MakeShare, part_units
from models import contents, write_family, write_recipe


def drained(schedule: Schedule) -> list[str]:
    found = []
    while (unit := schedule.next()) is not None:
        found.append(unit.key)
    return found


def test_the_longest_units_come_first_and_none_before_those_that_it_comes_after():
    schedule = Schedule([Unit("a", seconds=1), Unit("b", seconds=3), Unit("c", seconds=9, after=("a", "b"))])
    assert drained(schedule) == ["b", "a"] and not schedule.complete
    schedule.finish(Unit("a"), 1)
    assert drained(schedule) == []
    schedule.finish(Unit("b"), 2)
    together = schedule.next()
    assert schedule.before(together) == {"a": 1, "b": 2}
    schedule.finish(together, 3)
    assert schedule.complete


def test_the_end_of_a_unit_costs_the_same_however_many_units_there_are():
    def seconds(count):
        schedule = Schedule([Unit(f"u{i}") for i in range(count)])
        began = time.process_time()
        while (unit := schedule.next()) is not None:
            schedule.finish(unit, None)
        return time.process_time() - began

    assert seconds(8_000) < 40 * min(seconds(1_000) for _ in range(5))  # 8 times as many; of every pair 64 times


def test_a_unit_that_is_put_back_is_handed_out_again():
    schedule = Schedule([Unit("a")])
    schedule.put_back(schedule.next())
    assert drained(schedule) == ["a"]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_local_engine_gives_each_unit_the_results_of_those_before(tmp_path, workers):
    units, told = [Unit("x"), Unit("y"), Unit("z", after=("x", "y"))], {}
    LocalEngine(workers).run(Writing(tmp_path), units, lambda unit, result: told.__setitem__(unit.key, result))
    assert told == {"x": "X", "y": "Y", "z": "Z"} and (tmp_path / "z").read_text() == "x y"


def test_the_local_engine_stops_at_the_first_fault(tmp_path):
    units = [Unit("bad", seconds=2, data="input"), *(Unit(f"u{i}") for i in range(20))]
    with pytest.raises(InputError, match="the recipe is wrong"):
        LocalEngine(1).run(Writing(tmp_path), units, lambda unit, result: None)
    assert len(list(tmp_path.glob("u*.attempt0"))) < 20


def test_an_engine_that_there_is_not_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(
        InputError, match=r"'slurm': there is none of that name\. Choose from local, ray, ray://host:port"
    ):
        opened_engine("slurm").__enter__()
    with pytest.raises(InputError, match="workers must be at least 1"):
        opened_engine("local", 0).__enter__()


def test_a_package_may_add_an_engine(monkeypatch):
    class Point:
        name = "threads"

        def load(self):
            return lambda address, workers: LocalEngine(workers or int(address))

    monkeypatch.setattr(
        "massmerge.engines.choose.entry_points", lambda group: [Point()] * (group == "massmerge.engines")
    )
    with opened_engine("threads://3") as engine:
        assert engine.workers == 3


@pytest.mark.parametrize(
    ("data", "fault"), [("input", "input"), ("work", "work"), ("disk", "passing"), ("memory", "passing")]
)
def test_a_worker_tells_what_kind_of_fault_it_met(tmp_path, data, fault):
    found = carry_out(Parcel.of(Writing(tmp_path)), Unit("u", data=data), {}, "c.claim", "node1")
    assert found.fault == fault and "process" in found.worker
    assert not (tmp_path / "c.claim").exists()


def test_a_worker_of_another_version_refuses_before_it_opens_the_job(tmp_path, monkeypatch):
    parcel = Parcel.of(Writing(tmp_path))
    monkeypatch.setattr("massmerge.__version__", "9.9")
    found = carry_out(parcel, Unit("u"), {}, "c.claim", "node1")
    assert found.fault == "version" and "massmerge 9.9 instead of" in found.message
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", {"red": 2, "green": 3, "blue": 2}, router={"first_pass": "fixed"})
    return folder


def test_small_tensors_share_a_unit_and_large_ones_are_cut_by_task(family, monkeypatch):
    plan = make_plan(family / "recipe.yaml")
    assert [len(unit.data.indices) for unit in part_units(plan, {}, {}, 10.0)] == [len(plan.tensors)]
    assert len(part_units(plan, {}, {}, 0.0)) == len(plan.tensors)
    monkeypatch.setattr(massmerge.merging.units, "SPLIT", 0.0)
    first = tensor_key(0)
    units = part_units(plan, {f"{first}.1": "file"}, {}, 0.0)
    kinds = {kind: [u for u in units if isinstance(u.data, kind)] for kind in (MakeParts, MakeShare, Combine)}
    assert len(kinds[Combine]) == len(plan.matrices) and len(kinds[MakeParts]) == len(plan.tensors) - len(plan.matrices)
    together = next(u for u in kinds[Combine] if u.data.index == 0)
    assert together.data.shares == {"green": "file"}
    assert [u.data.task for u in kinds[MakeShare] if u.key in together.after] == ["red", "blue"]


@pytest.mark.parametrize("options", [{}, {"method": "tsv_m"}, {"method": "tsv_c"}, {"factors": "int8"}])
def test_a_tensor_that_is_cut_by_task_has_the_same_bytes(family, tmp_path, monkeypatch, options):
    recipe = write_recipe(family, ["red", "green", "blue"], name="cut.yaml", **options)
    whole = contents(merge(recipe, tmp_path / "whole", workers=1))
    monkeypatch.setattr(massmerge.merging.units, "SPLIT", 0.0)
    assert contents(merge(recipe, tmp_path / "cut", workers=2)) == whole


def test_factors_of_a_task_that_are_finished_are_not_made_again(family, tmp_path, monkeypatch):
    monkeypatch.setattr(massmerge.merging.units, "SPLIT", 0.0)
    recipe, out, made = family / "recipe.yaml", tmp_path / "out", []
    real = massmerge.merging.worker.MergeWorker._share

    def share(self, data):
        if len(made) == 4:
            raise MassError("stop")
        made.append((data.index, data.task))
        return real(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(massmerge.merging.worker.MergeWorker, "_share", share)
        with pytest.raises(MassError, match="stop"):
            merge(recipe, out, workers=1)
    first, made = made, []
    monkeypatch.setattr(
        massmerge.merging.worker.MergeWorker,
        "_share",
        lambda self, data: made.append((data.index, data.task)) or real(self, data),
    )
    merge(recipe, out, workers=1)
    assert first and not set(first) & set(made)
    assert contents(out) == contents(merge(recipe, tmp_path / "fresh", workers=1))
