"""Studies of models that write: the paper's GLUE table by one command, and what the other studies say of texts."""

import json
import random

import pytest
import torch
import transformers as tf
import yaml
from click.testing import CliRunner

import massmerge
from massmerge import InputError, Recipe
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from massmerge.evaluation.scales import choose_scale, with_scale
from massmerge.recipe import MergeOptions
from massmerge.research.studies import STUDIES
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.settings import StudySettings
from models import FAMILIES

WORDS = ["free", "win", "prize", "call", "meeting", "report", "goal", "team", "vote", "law", "cell", "star"]
GLUE_TABLE = {"base", "average", "task_arithmetic", "ties", "wemoe", "smile_1", "smile_2", "mass", "experts"}


def text_of(model: tf.PreTrainedModel, tokenizer, prompt: str) -> str:
    """What transformers writes with a model."""
    ids = tokenizer(prompt, return_tensors="pt")
    written = model.generate(ids.input_ids, attention_mask=ids.attention_mask, max_new_tokens=3)[0]
    start = 0 if model.config.is_encoder_decoder else ids.input_ids.shape[1]
    return tokenizer.decode(written[start:], skip_special_tokens=True)


def make_suite(folder, kind: str):
    """A tiny T5 or Llama with two experts that write, and a suite whose right answers are the experts' own texts."""
    make_writing_example(folder / "tokens")
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "tokens" / "base")
    torch.manual_seed(0)
    if kind == "t5":
        config = tf.T5Config(vocab_size=len(tokenizer), d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2,
                             tie_word_embeddings=False, decoder_start_token_id=0, eos_token_id=3)  # fmt: skip
        base = tf.T5ForConditionalGeneration(config)
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    else:
        config = FAMILIES["llama"].make_config(vocab_size=len(tokenizer), tie_word_embeddings=False)
        base = tf.LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tasks = {}
    for seed, task in enumerate(("sport", "mail")):
        expert = type(base).from_pretrained(folder / "base").eval()
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
        expert.save_pretrained(folder / task)
        chance = random.Random(seed)
        for split in ("test", "validation"):
            rows: list[dict[str, str]] = []
            while len(rows) < 4:
                prompt = " ".join(chance.sample(WORDS, 4))
                text = text_of(expert, tokenizer, prompt)
                rows += [{"text": prompt, "label": text}] if text.strip() else []
            (folder / f"{task}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks[task] = {"data": f"{task}.{{split}}.jsonl", "input": "text"}
    (folder / "suite.yaml").write_text(yaml.safe_dump({"tasks": tasks, "generate": {"max_new_tokens": 3}}))
    recipe = {
        "base": "base",
        "tasks": [{"name": t, "expert": t} for t in tasks],
        "merge": {"rank": 16 if kind == "t5" else 32},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module", params=["t5", "llama"])
def folder(request, tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp(request.param), request.param)


def study(folder, name: str):
    settings = StudySettings(quick=name != "oracle", limit=3)
    return run_studies(name, folder / "suite.yaml", folder / "study", recipe=folder / "recipe.yaml", settings=settings)


@pytest.fixture(scope="module")
def table(folder) -> dict[str, dict]:
    """The rows of the paper's table by their methods, as its one command prints them."""
    call = ["study", "methods", str(folder / "suite.yaml"), "--recipe", str(folder / "recipe.yaml"),
            "--out", str(folder / "table"), "--limit", "3", "--json"]  # fmt: skip
    done = CliRunner().invoke(main, call)
    assert done.exit_code == 0, done.output
    return {row["method"]: row for row in json.loads(done.stdout)["rows"]}


def test_the_papers_table_is_one_command(table):
    rows = table
    assert rows.keys() >= GLUE_TABLE
    assert rows["experts"]["task_given"]["mean"] == 1, "the right answers are the experts' own texts"
    assert rows["mass, task given"]["task_given"]["mean"] == 1, "at full rank, MASS given the task is the expert"
    for name in ("average", "ties", "smile_1", "wemoe", "mass"):
        assert rows[name]["task_unknown"] == rows[name]["task_given"], "a text needs no head"
    assert rows["average"]["of_the_base"] == pytest.approx(1, abs=0.2)


def test_a_static_merge_is_measured_as_transformers_would(folder, table):
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"merge": {"method": "average"}}
    (folder / "average.yaml").write_text(yaml.safe_dump(recipe))
    massmerge.merge(folder / "average.yaml", folder / "average", overwrite=(folder / "average").exists())
    found = massmerge.evaluate(folder / "average", folder / "suite.yaml", limit=3)
    assert table["average"]["task_unknown"]["mean"] == pytest.approx(found.means["strict"].value)


# Studies ask for texts in one place, whatever writes them: each runs with one of the two kinds.
OTHERS = sorted(set(STUDIES) - {"methods", "oracle"})


@pytest.mark.parametrize(
    ("folder", "name"), zip(["t5", "llama"] * len(OTHERS), OTHERS, strict=False), indirect=["folder"]
)
def test_every_other_study_runs_on_texts(folder, name):
    assert study(folder, name)[0].finding.rows


def test_a_study_of_heads_says_why_it_has_nothing_to_say(folder):
    with pytest.raises(InputError, match="study oracle: these models write their answers and have no heads"):
        study(folder, "oracle")


def test_the_scale_of_a_static_merge_is_chosen_by_its_texts(folder, tmp_path):
    options = MergeOptions.model_validate({"method": "task_arithmetic", "scale": "auto"})
    recipe = Recipe.load(folder / "recipe.yaml").model_copy(update={"merge": options})
    found = choose_scale(recipe, folder / "suite.yaml", tmp_path / "work", folder=folder)
    merged = massmerge.merge(with_scale(recipe, found.scale), tmp_path / "out", folder=folder)
    measured = massmerge.evaluate(merged, folder / "suite.yaml", split="validation")
    assert measured.means["strict"].value == pytest.approx(found.figures[found.scale])


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_texts_by_the_workers_of_an_engine_give_the_same_figures(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("massmerge.model.row_job._ROWS", 2)
    found = {}
    for name, engine in (("here", None), ("there", "local")):
        options = {"recipe": folder / "recipe.yaml", "engine": engine, "batch_size": 2, "quick": True}
        (result,) = massmerge.study("batch", folder / "suite.yaml", out=tmp_path / name, **options)
        found[name] = result.finding.rows
    assert found["there"] == found["here"]
