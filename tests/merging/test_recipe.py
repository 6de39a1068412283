import pytest
import yaml

from massmerge import InputError, Recipe
from massmerge.recipe import METHODS

SMALL = "base: b\ntasks:\n  - {name: one, expert: e}\n"


def fault(text: str) -> str:
    with pytest.raises(InputError) as caught:
        Recipe.parse(text, "recipe.yaml")
    return str(caught.value)


def test_two_keys_are_a_recipe_and_the_budget_is_twice_the_base():
    recipe = Recipe.parse(SMALL)
    assert (recipe.base, recipe.tasks[0].name, recipe.tasks[0].expert) == ("b", "one", "e")
    assert (recipe.merge.method, recipe.merge.budget, recipe.merge.rank) == ("mass", 2.0, None)
    assert recipe.router.first_pass == "base"


def test_a_rank_takes_the_place_of_the_budget():
    assert Recipe.parse(SMALL + "merge: {rank: 8}").merge.budget is None


@pytest.mark.parametrize("rank", ["1/T", 1, 32, 0.9])
def test_a_rank_is_a_share_of_the_full_one_or_a_number_or_a_share_of_energy(rank):
    assert Recipe.parse(SMALL + f"merge: {{rank: {rank}}}").merge.rank == rank


@pytest.mark.parametrize("rank", ["0", "-1", "1.0", "1.5", "2/T", "true", "[1]"])
def test_other_ranks_are_refused(rank):
    assert "recipe.yaml:4: 'merge.rank': a rank is 1/T" in fault(SMALL + f"merge: {{rank: {rank}}}")


FOUR = ["full"] * 4


@pytest.mark.parametrize(
    ("text", "forms", "most"),
    [
        ("", FOUR, 32),  # a third of the space, shared
        ("", ["full", "adapter"], 64),
        ("", ["full"] * 8, 16),
        ("", ["full"] * 20, 16),
        ("", ["adapter"] * 4, None),
        ("merge: {rank: 1/T}", FOUR, None),
        ("merge: {rank: 1/T}\nrouter: {rank: 7}", FOUR, 7),
        ("router: {rank: full}", FOUR, None),
    ],
)
def test_full_fine_tunes_route_by_a_third_of_the_space_unless_a_rank_was_asked_for(text, forms, most):
    assert Recipe.parse(SMALL + text).routing_rank(384, forms) == most


def test_older_versions_read_what_is_dumped_where_all_is_routed_by_default():
    assert "rank" not in yaml.safe_load(Recipe.parse(SMALL).dump())["router"]
    assert yaml.safe_load(Recipe.parse(SMALL + "router: {rank: full}").dump())["router"]["rank"] == "full"


@pytest.mark.parametrize("rank", ["0", "half", "0.5"])
def test_routing_by_no_vectors_or_by_a_share_is_refused(rank):
    assert "recipe.yaml:4: 'router.rank" in fault(SMALL + f"router: {{rank: {rank}}}")


@pytest.mark.parametrize("method", METHODS)
def test_a_dumped_recipe_names_the_methods_own_options_and_no_others(method):
    recipe = Recipe.parse(SMALL + f"merge: {{method: {method}}}")
    assert Recipe.parse(recipe.dump()) == recipe
    shown = set(yaml.safe_load(recipe.dump())["merge"])
    assert shown == {"method", *recipe.merge.own()} - ({"rank"} if method == "mass" else set())


def test_what_is_dumped_is_the_same_recipe():
    text = (
        SMALL
        + "merge: {rank: 0.9, redundancy: none}\nrouter: {site: [M1, A2], top_k: 3}\nshared_labels: [[one/a, one/b]]"
    )
    recipe = Recipe.parse(text)
    assert Recipe.parse(recipe.dump()) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bse: x\n" + SMALL, "recipe.yaml:1: unknown key 'bse' (known here: base, tasks"),
        (SMALL + "merge:\n  budgt: 2", "recipe.yaml:5: unknown key 'merge.budgt' (known here: method, budget"),
        (SMALL + "merge: {redundancy: {metrik: cosine}}", "unknown key 'merge.redundancy.metrik' (known here: metric"),
        ("base: b\ntasks:\n  - {name: one, expert: e, headz: x}", "recipe.yaml:3: unknown key 'tasks.0.headz'"),
        (SMALL + "merge: {budget: much}", "recipe.yaml:4: 'merge.budget': should be a valid number"),
        (SMALL + "merge: {budget: .inf}", "recipe.yaml:4: 'merge.budget': should be a finite number"),
        (SMALL + "merge: {budget: 1.0}", "'merge.budget': should be greater than 1 (it is 1.0)"),
        (SMALL + "merge: tsv_m", "recipe.yaml:4: 'merge': should be a mapping of keys to values (it is 'tsv_m')"),
        (SMALL + "merge: {method: sum}", "'merge.method': should be 'mass', 'average', 'task_arithmetic', 'ties', 'dare'"),
        (SMALL + "merge:\n  method: ties\n  drop: 0.5",
         "recipe.yaml:6: 'merge.drop': is not an option of ties; its options are keep, combine, scale"),
        (SMALL + "merge: {method: average, scale: 1}",
         "'merge.scale': is not an option of average; its options are max_shard_size"),
        (SMALL + "merge: {max_shard_size: big}", "'merge.max_shard_size': 'big' is no size; write bytes, or 512MB"),
        (SMALL + "merge: {max_shard_size: 0}", "'merge.max_shard_size': a file of weights takes at least one byte"),
        (SMALL + "merge: {method: tsv_m, budget: 3}", "'merge.budget': is not an option of tsv_m; its options are rank"),
        (SMALL + "merge: {scale: 0.3}", "'merge.scale': is not an option of mass; its options are budget, rank"),
        (SMALL + "merge: {method: ties, keep: 20}", "'merge.keep': should be less than or equal to 1 (it is 20)"),
        (SMALL + "merge: {method: dare, drop: 1.0}", "'merge.drop': should be less than 1 (it is 1.0)"),
        (SMALL + "merge: {method: iso_c, scale: big}", "'merge.scale': should be 'auto' or a valid number"),
        (SMALL + "merge: {redundancy: no way}", "'merge.redundancy': should be a mapping of keys to values or 'none'"),
        (SMALL + "router: {site: 3}", "'router.site': should be a valid string or a valid list"),
        ("base: b\ntasks:\n  - {name: 12, expert: e}", "recipe.yaml:3: 'tasks.0.name': should be a valid string; write"),
        ("base: b\ntasks: []", "recipe.yaml:2: 'tasks' is empty; give at least one"),
        ("tasks:\n  - {name: one, expert: e}", "recipe.yaml:1: 'base' is missing"),
        ("base: b\nbase: c\n" + SMALL.partition("\n")[2], "recipe.yaml:2: the key 'base' occurs twice"),
        (SMALL + "merge: {budget: 2.0, rank: 3}", "give either budget or rank, not both"),
        ("base: [b", "recipe.yaml:1: not valid YAML"),
        ("base: &a [*a]", "recipe.yaml:1: 'base': should be a valid string"),
        ("base: b\ntasks: &a [*a]", "recipe.yaml:2: 'tasks"),
        ("base: " + "[" * 5000, "nested too deeply, or an anchor"),
        ("base: 2020-13-45", "recipe.yaml: contains a value that cannot be read (month must be in 1..12)."),
        ("base: " + "7" * 5000, "recipe.yaml: contains a value that cannot be read"),
        (SMALL + "router: {site: []}", "recipe.yaml:4: 'router.site' is empty; give at least one"),
        ("", "a recipe is a mapping with the keys base and tasks"),
        ("- base", "a recipe is a mapping with the keys base and tasks"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_line_and_what_would_be_right(text, message):
    assert message in fault(text)


def test_all_faults_are_told_at_once():
    found = fault(
        "base: 3\ntasks:\n  - {name: a/b, expert: e}\n  - {expert: e}\nmerge: {rank: big}\nextra: 1"
    ).splitlines()
    assert [line.split(":")[1] for line in found] == ["1", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a\\b", "a b", "-a", "é", "con", "NUL.txt", "a.", "x" * 101]
)
def test_a_task_name_that_is_no_folder_name_is_refused(name):
    text = f"base: b\ntasks:\n  - name: '{name}'\n    expert: e"
    assert "recipe.yaml:3: 'tasks.0.name'" in fault(text) and "is not a valid task name" in fault(text)


@pytest.mark.parametrize("second", ["one", "ONE"])
def test_two_tasks_of_one_name_are_refused_whatever_the_case(second):
    assert f"two tasks are called '{second}': give each its own name" in fault(
        SMALL + f"  - {{name: {second}, expert: f}}"
    )


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such recipe"):
        Recipe.load(tmp_path / "nowhere.yaml")


def test_a_recipe_that_is_no_text_is_named(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"r\.yaml: cannot be read"):
        Recipe.load(tmp_path / "r.yaml")


def test_a_few_lines_of_anchors_that_stand_for_billions_of_values_are_refused_at_once():
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert "unknown key 'a29'" in fault("\n".join(lines) + "\n" + SMALL)
