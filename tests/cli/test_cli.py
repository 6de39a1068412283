import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

import massmerge
from massmerge.cli.main import main
from models import write_family, write_recipe


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    recipe = write_family(folder, "bert", {"red": 2, "green": 3})
    assert run("merge", recipe, folder / "out", "-q").exit_code == 0
    return folder


@pytest.fixture
def bundle(family, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(family / "out", tmp_path / "bundle"))


def verbs(family: Path, out: Path) -> dict[str, list[object]]:
    return {
        "plan": ["plan", family / "recipe.yaml"],
        "merge": ["merge", family / "recipe.yaml", out],
        "inspect": ["inspect", family / "out"],
        "verify": ["verify", family / "out", "--experts", "--folder", family],
    }


VERBS = ["plan", "merge", "inspect", "verify"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_does_its_work_and_exits_with_0(family, tmp_path, verb):
    result = run(*verbs(family, tmp_path / "out")[verb])
    assert result.exit_code == 0 and result.stdout.strip()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_json_and_nothing_else_when_asked(family, tmp_path, verb):
    result = run(*verbs(family, tmp_path / "out")[verb], "--json")
    assert isinstance(json.loads(result.stdout), dict) and result.stderr == ""


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_silent_when_asked(family, tmp_path, verb):
    result = run(*verbs(family, tmp_path / "out")[verb], "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("verb", [*VERBS, "demo"])
def test_every_verb_explains_itself(verb):
    result = run(verb, "--help")
    assert result.exit_code == 0 and "--json" in result.stdout and "-q, --quiet" in result.stdout


def test_the_version_is_told():
    assert run("--version").stdout.strip() == f"mass, version {massmerge.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [["fly"], ["plan"], ["merge", "recipe.yaml"], ["inspect", ".", "--colour"], ["merge", "a", "b", "--workers", 0]],
)
def test_a_call_that_is_wrong_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_a_plan_shows_tasks_ranks_sizes_memory_and_time(family):
    text = run("plan", family / "recipe.yaml").stdout
    for part in ("2 tasks on base (BertModel)", "BertForSequenceClassification", "60×32", "together", "times the base",
                 "peak memory about", "time about"):  # fmt: skip
        assert part in text


def test_a_plan_lists_every_tensor_when_asked(family):
    text = run("plan", family / "recipe.yaml", "--tensors").stdout
    assert "encoder.layer.1.output.dense.weight" in text and "encoder.layer.1.output.LayerNorm.bias" in text


def test_a_plan_with_an_error_is_printed_and_exits_with_2(family):
    recipe = write_recipe(family, ["red", "missing"], name="missing.yaml")
    result = run("plan", recipe, "--json")
    assert result.exit_code == 2 and "error: task missing: missing: no such" in result.stderr
    assert [p["where"] for p in json.loads(result.stdout)["problems"]] == ["task missing"]


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 2)])
def test_a_warning_is_an_error_only_when_strict(family, options, code):
    recipe = write_recipe(family, ["red", "green"], name="tight.yaml", budget=1.01)
    result = run("plan", recipe, "-q", *options)
    assert result.exit_code == code and "warning: budget: is too small" in result.stderr


def test_a_merge_says_what_it_wrote_and_what_comes_next(family, tmp_path):
    result = run("merge", family / "recipe.yaml", tmp_path / "out")
    assert "times the base without heads" in result.stdout and f"mass inspect {tmp_path / 'out'}" in result.stdout


def test_a_static_merge_says_how_to_load_it(family, tmp_path):
    recipe = write_recipe(family, ["red", "green"], name="static.yaml", method="tsv_m")
    assert "AutoModel.from_pretrained(" in run("merge", recipe, tmp_path / "out").stdout


def test_the_summary_of_a_merge_has_its_path_tasks_and_ratio(family, tmp_path):
    summary = json.loads(run("merge", family / "recipe.yaml", tmp_path / "out", "--json").stdout)
    assert (
        summary["path"] == str(tmp_path / "out") and summary["tasks"] == ["red", "green"] and 1 < summary["ratio"] <= 2
    )


def test_inspect_shows_energy_sizes_and_similarity(family):
    text = run("inspect", family / "out").stdout
    for part in ("energy kept, by block", "encoder.layer.1", "similarity of the tasks", "everything else", "LABEL_0"):
        assert part in text


def test_inspect_draws_a_picture(family, tmp_path):
    result = run("inspect", family / "out", "--plot", tmp_path / "plot.png")
    assert f"plot in {tmp_path / 'plot.png'}" in result.stdout
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG"


def test_sites_have_no_picture(family, tmp_path):
    result = run("inspect", family / "out", "--sites", "--plot", tmp_path / "plot.png")
    assert result.exit_code == 2 and "--sites lists sites, --plot draws energy and similarity" in result.stderr
    assert result.stdout == "" and not (tmp_path / "plot.png").exists()


def test_a_picture_that_cannot_be_written_is_an_error_without_a_trace(family, tmp_path):
    result = run("inspect", family / "out", "--plot", tmp_path / "nowhere" / "plot.png")
    assert result.exit_code == 1 and "plot.png: No such file or directory" in result.stderr


def test_verify_names_damage_and_exits_with_1(bundle):
    (bundle / "README.md").write_text("mine")
    result = run("verify", bundle)
    assert result.exit_code == 1 and "README.md: 4 bytes" in result.stdout and "Merge again, or copy" in result.stdout


def test_verify_shows_errors_of_each_task_and_its_worst_tensors(family):
    text = run(*verbs(family, family)["verify"]).stdout
    assert "as expected" in text and "worst tensors" in text and "expected at its rank" in text


def test_inspect_refuses_a_damaged_bundle(bundle):
    (bundle / "recipe.yaml").unlink()
    result = run("inspect", bundle)
    assert result.exit_code == 2 and "recipe.yaml: missing" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(("options", "shown"), [([], False), (["-v"], True)])
def test_the_trace_of_an_error_is_shown_only_when_asked(tmp_path, caplog, options, shown):
    result = run("inspect", tmp_path, *options)
    assert ("Traceback" in result.stderr + caplog.text) is shown
