"""Nothing in a bundle, base, expert, head or processor runs code: it is refused, and the file is named."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import massmerge
from attacks import edit, resign
from massmerge import InputError
from massmerge.checkpoints.pretrained import empty_model, model_class
from massmerge.cli.main import main
from models import FAMILIES, image_bundle, text_bundle, write_family
from writers import chat_bundle

PACKAGE = Path(massmerge.__file__).parent
KERNEL = "evil/attention"


@pytest.fixture
def bundle(root, tmp_path) -> Path:
    """A copy of a bundle of texts to spoil."""
    return Path(shutil.copytree(text_bundle(root), tmp_path / "bundle"))


def refusals(bundle: Path, *, verify: bool = True) -> dict[str, str]:
    """What each way to open a bundle says; all of them must refuse it."""
    found = {}
    for command in (["predict", bundle, "some text"], ["inspect", bundle], *([["verify", bundle]] if verify else [])):
        done = CliRunner().invoke(main, [str(part) for part in command])
        assert done.exit_code == 2, (command, done.output, done.exception)
        found[command[0]] = done.output
    for check in (True, False, "background"):
        with pytest.raises(InputError) as caught:
            massmerge.load(bundle, check=check)
        found[f"load {check}"] = str(caught.value)
    return found


def test_code_in_a_bundle_does_not_run_when_the_first_text_on_standard_input_says_yes(bundle, tmp_path):
    """As transformers asks: a line of standard input is its answer, and there `mass predict BUNDLE -` has its texts."""
    mark = tmp_path / "ran"
    (bundle / "processor" / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Evil(PreTrainedTokenizerFast): pass\n"
    )
    edit(
        bundle / "processor" / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "evil.Evil"]}, tokenizer_class="Evil",
    )  # fmt: skip
    resign(bundle)
    done = subprocess.run(
        [sys.executable, "-c", "from massmerge.cli.main import main; main()", "predict", str(bundle), "-"],
        input="y\nsome text\n",
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not mark.exists()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "evil.py" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("processor/tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}, "`auto_map`"),
        ("processor/processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}, "`auto_map`"),
        ("base/config.json", {"auto_map": {"AutoConfig": "evil.Evil"}}, "`auto_map`"),
        ("base/config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Evil"}}}, "`auto_map`"),
        ("base/config.json", {"_attn_implementation": KERNEL}, KERNEL),
        ("base/config.json", {"attn_implementation": {"": KERNEL}}, KERNEL),
        ("base/config.json", {"_attn_implementation_internal": KERNEL}, KERNEL),
        ("base/config.json", {"vision_config": {"attn_implementation": KERNEL}}, KERNEL),
        ("base/config.json", {"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ("base/config.json", {"experts_implementation": "sonicmoe"}, "sonicmoe"),
        ("base/config.json", {"attribute_map": {"x": "_attn_implementation"}, "x": KERNEL}, "attribute_map"),
        ("base/config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("base/config.json", {"keypoint_detector_config": {"trust_remote_code": True}}, "trust_remote_code"),
        ("base/generation_config.json", {"custom_generate": "evil/generate"}, "custom_generate"),
        ("tasks/spam/head/config.json", {"auto_map": {"AutoConfig": "evil.Evil"}}, "`auto_map`"),
        ("tasks/spam/head/config.json", {"_attn_implementation": KERNEL}, KERNEL),
        ("tasks/spam/head/config.json", {"num_labels": 1_000_000_000}, "num_labels"),
        ("tasks/spam/head/config.json", {"num_labels": 1e9}, "num_labels"),
        ("base/config.json", {"num_hidden_layers": 1_000_000_000}, "num_hidden_layers"),
        ("base/generation_config.json", {"num_beams": 1_000_000}, "num_beams"),
    ],
)
def test_a_configuration_that_names_code_or_endless_sizes_is_refused_with_its_file(bundle, file, fields, words):
    edit(bundle / file, **fields)
    resign(bundle)
    for said in refusals(bundle).values():
        assert file in said and words in said


DEEP = '{"a":' * 400 + "1" + "}" * 400


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("base/config.json", DEEP, "nested in more than 50 levels"),
        ("tasks/spam/head/config.json", DEEP, "nested in more than 50 levels"),
        ("tasks/spam/head/config.json", "{", "not valid JSON"),
        ("tasks/spam/head/config.json", "[]", "no JSON object"),
        ("tasks/spam/labels.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_json_of_no_sense_or_endless_depth_is_refused_with_its_file(bundle, file, text, words):
    (bundle / file).write_text(text)
    resign(bundle)
    for said in refusals(bundle).values():
        assert file in said and words in said


@pytest.mark.parametrize(
    "name", ["processor/evil.py", "base/modeling_evil.py", "custom_generate/generate.py", "base/pytorch_model.bin",
             "base/adapter_config.json", "tasks/spam/head/lib.so"],
)  # fmt: skip
def test_a_bundle_with_files_that_no_merge_writes_is_refused(bundle, name):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("{}")
    resign(bundle)
    assert all(name in said for said in refusals(bundle).values())


@pytest.mark.parametrize(
    ("change", "verify"),
    [(lambda t: t * torch.nan, False), (lambda t: t * 1e38, False), (lambda t: t[:0], True), (torch.flatten, True)],
)
def test_factors_that_are_none_are_refused_by_whatever_reads_them(bundle, change, verify):
    file = bundle / "tasks/spam/factors.safetensors"
    save_file({name: change(tensor).clone() for name, tensor in load_file(file).items()}, file)
    resign(bundle)
    for said in refusals(
        bundle, verify=verify
    ).values():  # which computes with the factors only if it is given the experts
        assert "do not go together" in said or "do not fit the base" in said


def test_an_adapter_beside_the_base_that_the_manifest_does_not_name_is_not_followed(bundle):
    edit(bundle / "base" / "adapter_config.json", base_model_name_or_path="evil/base", peft_type="LORA")
    for check in (True, False):
        with pytest.raises(InputError, match=r"adapter_config\.json"):
            massmerge.load(bundle, check=check)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "base/generation_config.json",
            '{"do_sample": true, "temperature": 0.0}',
            r"generation_config\.json: .*positive",
        ),
        ("base/generation_config.json", '{"stop_strings": [3]}', "stop_strings are texts"),
        ("processor/chat_template.jinja", "{{ 1 / 0 }}", "chat template does not take these messages"),
        ("processor/chat_template.jinja", "{{ messages.__class__.__mro__ }}", "chat template does not take these"),
    ],
)
def test_what_a_base_says_of_writing_is_refused_in_words_where_it_makes_no_sense(root, tmp_path, file, text, words):
    bundle = Path(shutil.copytree(chat_bundle(root), tmp_path / "bundle"))
    (bundle / file).write_text(text)
    resign(bundle)
    with pytest.raises(InputError, match=words):
        massmerge.load(bundle, check=False).generate(messages=[{"role": "user", "content": "a"}], task="a")


def test_an_image_processor_with_code_is_refused(root, tmp_path):
    bundle = Path(shutil.copytree(image_bundle(root), tmp_path / "bundle"))
    edit(bundle / "processor" / "preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Evil"})
    resign(bundle)
    assert all("preprocessor_config.json" in said for said in refusals(bundle).values())


@pytest.mark.parametrize("place", ["base/config.json", "red/config.json", "base/tokenizer_config.json",
                                   "base/generation_config.json"])  # fmt: skip
@pytest.mark.parametrize("verb", ["plan", "merge"])
def test_sources_of_a_merge_that_name_code_are_refused_with_their_file(tmp_path, place, verb):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    edit(tmp_path / place, auto_map={"AutoConfig": "evil.Evil", "AutoTokenizer": [None, "evil.Evil"]})
    out = [str(tmp_path / "out")] if verb == "merge" else []
    done = CliRunner().invoke(main, [verb, str(recipe), *out])
    assert done.exit_code == 2 and place in done.output and "auto_map" in done.output, done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["base", "red"])
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_quantised_sources_of_a_merge_are_refused_with_the_remedy(tmp_path, place, method):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    edit(tmp_path / place / "config.json", quantization_config={"quant_method": method, "load_in_4bit": True})
    done = CliRunner().invoke(main, ["plan", str(recipe)])
    assert done.exit_code == 2 and f"{place}/config.json" in done.output and "dequantize" in done.output, done.output


def test_a_static_merge_with_code_is_refused(tmp_path):
    out = massmerge.merge(write_family(tmp_path, "bert", {"red": 2}, method="average"), tmp_path / "out", workers=1)
    edit(out / "config.json", _attn_implementation=KERNEL)
    resign(out)
    with pytest.raises(InputError, match=KERNEL):
        massmerge.StaticModel(out)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"0": "no"}', "[]"])
def test_a_static_merge_whose_labels_are_none_is_refused_with_the_file(tmp_path, text):
    out = massmerge.merge(write_family(tmp_path, "bert", {"red": 2}, method="average"), tmp_path / "out", workers=1)
    (out / "heads/red/labels.json").write_text(text)
    resign(out)
    with pytest.raises(InputError, match=r"heads/red/labels\.json: not "):
        massmerge.StaticModel(out)


def test_a_static_merge_whose_head_does_not_fit_is_refused(tmp_path):
    out = massmerge.merge(write_family(tmp_path, "bert", {"red": 2}, method="average"), tmp_path / "out", workers=1)
    file = out / "heads/red/head/model.safetensors"
    save_file({name: tensor[:1].clone() for name, tensor in load_file(file).items()}, file)
    resign(out)
    with pytest.raises(InputError, match="its parts do not go together"):
        massmerge.StaticModel(out)


def test_what_became_of_a_configuration_is_looked_at_again_before_a_model_is_built():
    config = FAMILIES["bert"].make_config()
    config._attn_implementation = KERNEL
    with pytest.raises(InputError, match=KERNEL):
        empty_model(config)


@pytest.mark.parametrize("name", ["pipeline", "RagRetriever", "AutoModel", "logging", "no_such_thing", None, 3])
def test_a_class_that_is_no_model_is_not_called(name):
    with pytest.raises(InputError, match="no model class"):
        model_class(name)


def test_a_label_may_be_called_as_it_likes(tmp_path):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    edit(tmp_path / "red/config.json", id2label={"0": "auto_map", "1": "x"}, label2id={"auto_map": 0, "x": 1})
    assert not massmerge.make_plan(recipe).errors


OPENING = {
    "from_pretrained",
    "from_config",
    "from_dict_and_code",
    "for_model",
    "pipeline",
    "get_class_from_dynamic_module",
}


def calls(path: Path) -> set[str]:
    """Names of the functions that a file calls which open objects of transformers, pickles, or code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in OPENING:
            found.add(node.attr)
        if isinstance(node, ast.Constant) and node.value in OPENING:
            found.add(str(node.value))  # by getattr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "eval", "exec"):
            found.add(ast.unparse(node.func))
    return found


def test_objects_of_transformers_are_opened_in_one_place_alone():
    found = {path.relative_to(PACKAGE).as_posix(): calls(path) for path in PACKAGE.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {
        "__init__.py": {"pipeline"},  # the name of a function of ours
        "checkpoints/pretrained.py": {"from_pretrained", "from_config"},
        "checkpoints/stores.py": {"torch.load"},  # for tensors alone
    }


OWN_JSON = {  # what these read, this program has written; or they say themselves what is wrong with it
    "cli/demo/base.py", "cli/demo/folder.py", "cli/demo/text.py", "evaluation/experts.py", "io/row_files.py",
    "io/rows.py", "io/spool.py", "io/tensor_file.py", "merging/plan.py", "merging/write.py", "model/row_job.py",
    "research/studies/cells.py",
}  # fmt: skip


def test_json_that_others_wrote_is_read_in_one_place_that_knows_its_traps():
    found = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "json.loads" in p.read_text("utf-8")}
    assert found == {"io/json_file.py", *OWN_JSON}


def test_everything_that_is_opened_there_is_told_to_trust_nothing():
    tree = ast.parse((PACKAGE / "checkpoints/pretrained.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(tuple(OPENING))]
    trusting = [
        ast.unparse(call.func)
        for call in calls
        if not any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in call.keywords)
    ]
    # Neither has such an option: numbers alone, and an adapter that this program has just written.
    assert sorted(trusting) == ["peft.PeftModel.from_pretrained", "transformers.GenerationConfig.from_pretrained"]


def test_verify_finds_a_hole_in_a_signed_file_of_tensors(bundle):
    path = bundle / "tasks/spam/factors.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [n + 8 for n in entry["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"hidden!!" + data[8 + length :])
    resign(bundle)
    done = CliRunner().invoke(main, ["verify", str(bundle)])
    assert done.exit_code == 1 and "tasks/spam/factors.safetensors: damaged: a gap before" in done.output, done.output


def test_fewer_labels_than_outputs_are_refused_when_the_bundle_is_loaded(bundle):
    (bundle / "tasks/spam/labels.json").write_text('["one"]')
    resign(bundle)
    with pytest.raises(InputError, match="spam has 1 labels, but its head has 2 outputs"):
        massmerge.load(bundle, check=False)
