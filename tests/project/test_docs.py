"""Docs run: examples are executed and shown outputs are compared.

The convention, for README.md, docs/ and examples/:
- every block fenced as `bash` or `python` is run, unless the word `norun` follows; `exit=2` says which exit code is meant;
- a block fenced as `text output` is what the block before it prints: numbers may differ in the last digit or two, `…` stands
  for anything, a line that is only `…` for any lines;
- a block fenced as `bash server` starts `mass serve`, which answers the blocks below it;
- a page that makes the example by `mass demo --tiny` starts in an empty folder, any other page inside the example.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import massmerge
from doc_pages import PAGES, ROOT, TEXT_EXAMPLES, Block, blocks, name_of
from massmerge.cli.demo.example import make_example
from massmerge.cli.main import main
from serving import serving

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def pages_that_run() -> list[Path]:
    return [page for page in PAGES if any(block.runs for block in blocks(page))]


# What runs the examples


def run_mass(arguments: str, given: str | None = None) -> tuple[int, str]:
    """The command in this process: importing the libraries anew would take longer than all examples."""
    result = CliRunner().invoke(main, shlex.split(arguments, comments=True), input=given)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_line(line: str) -> tuple[int, str]:
    """One line of a shell block; only what is no `mass` needs a shell."""
    if line.startswith("cd "):
        os.chdir(line.removeprefix("cd ").strip())
        return 0, ""
    if line.startswith("mass "):
        return run_mass(line.removeprefix("mass "))
    if line.startswith("python "):
        return 0, run_python(Block("python", [], Path(line.removeprefix("python ")).read_text(encoding="utf-8"), 1), {})
    before, pipe, after = line.partition("| mass ")
    done = subprocess.run(["bash", "-c", before], capture_output=True, text=True, timeout=20)
    if pipe and done.returncode == 0:
        return run_mass(after, done.stdout)
    return done.returncode, done.stdout + done.stderr


def run_bash(block: Block) -> str:
    printed = ""
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]
    for line in lines:
        code, output = run_line(line)
        assert code == block.exit_code or (code == 0 and line is not lines[-1]), f"{line}: exit code {code}\n{output}"
        printed += output
    return printed


def run_python(block: Block, names: dict) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(block.text, f"line {block.line}", "exec"), names)
    return printed.getvalue()


# How outputs are compared


def same_line(shown: str, printed: str) -> bool:
    """Whether a line is as shown, its numbers to the last digit or two."""
    pattern = ".*".join(NUMBER.sub("\0", re.sub(r"\s+", " ", part)) for part in re.split("…", shown.rstrip()))
    pattern = "(.*)".join(map(re.escape, pattern.split(".*"))).replace(re.escape("\0"), f"({NUMBER.pattern})")
    found = re.fullmatch(pattern, re.sub(r"\s+", " ", printed.rstrip()))
    if not found:
        return False
    numbers = [g for g in found.groups() if NUMBER.fullmatch(g)] if "…" not in shown else []
    sizes = [bool(re.match(r" [kMG]B\b", shown[m.end() :])) for m in NUMBER.finditer(shown)]
    return all(close(a, b, size=s) for a, b, s in zip(NUMBER.findall(shown), numbers, sizes, strict=False))


def close(shown: str, printed: str, *, size: bool = False) -> bool:
    """Whether two numbers agree; sizes to a tenth, since each key of a manifest adds to them."""
    if size:
        return abs(float(shown) - float(printed)) <= 0.1 * abs(float(shown))
    if re.fullmatch(r"-?\d+", shown):
        return shown == printed
    digits = 10.0 ** -len(shown.partition(".")[2].partition("e")[0])
    return abs(float(shown) - float(printed)) <= max(
        5 * digits * abs(float(shown)) if "e" in shown else 3 * digits, 1e-12
    )


def same_output(shown: str, printed: str) -> bool:
    """Whether the lines are as shown; a line that is only `…` stands for any number of them."""
    wanted = [line for line in shown.splitlines() if line.strip()]
    got = [line for line in printed.splitlines() if line.strip()]
    position = 0
    skipping = False
    for line in wanted:
        if line.strip() == "…":
            skipping = True
            continue
        while skipping and position < len(got) and not same_line(line, got[position]):
            position += 1
        if position >= len(got) or not same_line(line, got[position]):
            return False
        position, skipping = position + 1, False
    return skipping or position == len(got)


def test_outputs_are_compared_by_digits_and_gaps():
    assert same_output("a  0.574\n…\nend", "a 0.573\nb\nc\nend\n")
    assert not same_output("a 0.574", "a 0.474")
    assert not same_output("3 tasks", "4 tasks")
    assert not same_output("a", "a\nb")
    assert same_output("time: … ms", "time: 3.1 ms")
    assert same_output("heads  14.3 kB  0.003", "heads 14.9 kB 0.003")
    assert not same_output("heads  14.3 kB  0.003", "heads 16.9 kB 0.003")


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """The tiny example with its bundle, made once."""
    folder = tmp_path_factory.mktemp("docs") / "example"
    massmerge.merge(make_example(folder), folder / "out")
    return folder


@pytest.fixture
def place(example, tmp_path, monkeypatch):
    """A copy of the example in the current folder's place."""
    shutil.copytree(example, tmp_path / "example")
    monkeypatch.chdir(tmp_path / "example")
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "example"


@pytest.mark.parametrize("page", pages_that_run(), ids=name_of)
def test_every_example_runs_and_prints_what_is_shown(page, example, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    if page.parent == TEXT_EXAMPLES:
        shutil.copytree(TEXT_EXAMPLES, tmp_path / "start", ignore=shutil.ignore_patterns("example", "out*"))
    elif "mass demo --tiny" in page.read_text(encoding="utf-8"):
        (tmp_path / "start").mkdir()
    else:
        shutil.copytree(example, tmp_path / "start")
    monkeypatch.chdir(tmp_path / "start")
    with ExitStack() as stack:
        assert other_outputs(page, stack) == []


def other_outputs(page: Path, stack: ExitStack) -> list[str]:
    """Run the blocks of a page; the outputs that are not as shown."""
    found = []
    names: dict = {"__name__": "example"}
    printed, served = "", "localhost:8000"
    for block in blocks(page):
        if "server" in block.words:
            running = stack.enter_context(serving(*shlex.split(block.text)[2:]))
            served = running.url.removeprefix("http://")
        block = replace(block, text=block.text.replace("localhost:8000", served))
        if block.runs:
            printed = run_bash(block) if block.language == "bash" else run_python(block, names)
        elif "output" in block.words and not same_output(block.text, printed):
            found.append(f"{page.name}:{block.line} shows\n{block.text}\nprinted\n{printed}")
    return found


# The recipes in examples/


@pytest.fixture
def text_examples(place, monkeypatch) -> Path:
    """The folder of examples with the example that its README makes."""
    folder = place.parent / "text"
    shutil.copytree(TEXT_EXAMPLES, folder, ignore=shutil.ignore_patterns("example", "out*"))
    place.rename(folder / "example")
    monkeypatch.chdir(folder)
    return folder


def test_full_experts_and_an_adapter_answer_from_one_bundle(text_examples):
    massmerge.merge("full_and_adapter.yaml", "out")
    assert {p.task for p in massmerge.load("out").predict("call now", task="mood")} == {"mood"}
    assert [t.form for t in massmerge.Bundle("out").tasks] == ["full", "full", "adapter"]


def test_a_linear_head_file_answers_as_the_head_that_it_was_taken_from(text_examples):
    exec((text_examples / "make_head.py").read_text(encoding="utf-8"), {"__name__": "__main__"})
    massmerge.merge("linear_head.yaml", "out")
    expert = massmerge.load("example/out").predict("call now", task="spam")[0]
    linear = massmerge.load("out").predict("call now", task="spam")[0]
    assert (linear.label, linear.logit) == (expert.label, pytest.approx(expert.logit, abs=5e-3))


def test_the_papers_setting_runs(text_examples):
    massmerge.merge("paper.yaml", "out")
    model = massmerge.load("out")
    assert model.voters == ["M3.cls"]
    assert (text_examples / "out" / "fixed.safetensors").is_file()
    assert len(model.predict(["call now", "vote on the law"])) == 2


def test_a_static_merge_loads_with_transformers(text_examples):
    from transformers import AutoModel

    massmerge.merge("tsv_m.yaml", "out")
    assert type(AutoModel.from_pretrained("out")).__name__ == "BertModel"


def test_every_recipe_in_examples_has_a_test():
    """Those of folders that need the hub are tested by files of their own."""
    tested = {"full_and_adapter.yaml", "linear_head.yaml", "paper.yaml", "tsv_m.yaml"}
    assert {path.name for path in TEXT_EXAMPLES.glob("*.yaml")} == tested
    elsewhere = {
        "text",
        *(path.name for path in (ROOT / "examples").iterdir() if any((ROOT / "tests").glob(f"*/test_{path.stem}.py"))),
    }
    assert {path.name for path in (ROOT / "examples").iterdir()} == elsewhere
