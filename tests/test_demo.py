import json

from click.testing import CliRunner

from massmerge import Bundle
from massmerge.cli.main import main
from massmerge.verification import verify_bundle


def test_the_demo_plans_merges_inspects_and_verifies_a_bundle(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path)])
    assert result.exit_code == 0
    for verb in ("plan recipe.yaml", "merge recipe.yaml out/", "inspect out/", "verify out/ --experts"):
        assert f"$ mass {verb}" in result.stderr
    bundle = Bundle(tmp_path / "out")
    assert [(t.name, t.form) for t in bundle.tasks] == [("spam", "full"), ("topic", "full"), ("mood", "adapter")]
    assert bundle.tasks[2].labels == ("negative", "positive")
    assert bundle.counted_bytes <= 2 * bundle.base_bytes
    assert verify_bundle(tmp_path / "out", experts=True, folder=tmp_path).ok


def test_the_demo_tells_as_json_where_its_bundle_is(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path), "--json"])
    assert result.stderr == ""
    assert Bundle(json.loads(result.stdout)["bundle"]).damage() == []
