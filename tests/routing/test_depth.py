import pytest
import torch

from massmerge.routing.depth import deeper, mean_lift

TEXT = [f"{kind}{block}.mean" for block in range(6) for kind in "OM"]


@pytest.mark.parametrize(
    ("voters", "found"),
    [
        (TEXT, TEXT[6:]),
        (["O0.mean", "O1.mean", "O2.mean"], ["O1.mean", "O2.mean"]),
        (["M9.cls"], ["M9.cls"]),
        (["M9.cls", "M9.mean"], ["M9.cls", "M9.mean"]),
        (["M9.cls", "model.layers.3.mlp.mean"], ["M9.cls", "model.layers.3.mlp.mean"]),
        ([], []),
    ],
)
def test_the_deeper_half_of_the_blocks(voters, found):
    assert [voters[i] for i in deeper(voters)] == found


def test_the_lift_is_the_geometric_mean_of_the_deeper_outputs_of_attention():
    lifts = [torch.full((2, 3), 1.0 + i) for i in range(len(TEXT))]
    outputs = [1.0 + TEXT.index(name) for name in ("O3.mean", "O4.mean", "O5.mean")]
    expected = (outputs[0] * outputs[1] * outputs[2]) ** (1 / 3)
    assert torch.allclose(mean_lift(lifts, TEXT), torch.full((2, 3), expected))


def test_without_outputs_of_attention_the_deeper_voters_count():
    lifts = [torch.tensor([[value]]) for value in (9.0, 2.0, 8.0)]
    assert float(mean_lift(lifts, ["M0.cls", "M1.cls", "M2.cls"])) == pytest.approx(4)


def test_a_voter_for_which_a_task_holds_nothing_does_not_decide_alone():
    assert float(mean_lift([torch.zeros(1, 1), torch.ones(1, 1)], ["M9.cls", "M9.mean"])) > 0


def test_a_task_that_holds_nothing_anywhere_has_no_lift():
    assert float(mean_lift([torch.zeros(1, 1)] * 2, ["M9.cls", "M9.mean"])) == 0
