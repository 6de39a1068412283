"""A placement: which device and type are chosen, and what each tensor becomes."""

import pytest
import torch

from massmerge.errors import InputError
from massmerge.io import placement
from massmerge.io.placement import Placement


def chosen(base, device="cpu", dtype="auto"):
    return Placement.choose(device, dtype, base).compute


def test_a_base_in_bfloat16_stays_so_where_the_processor_multiplies_in_it(monkeypatch):
    monkeypatch.setattr(placement, "_has_bfloat16", lambda: True)
    assert chosen(torch.bfloat16) == torch.bfloat16
    monkeypatch.setattr(placement, "_has_bfloat16", lambda: False)
    assert chosen(torch.bfloat16) == torch.float32


def test_other_bases_are_float32_on_the_cpu_unless_a_type_is_named():
    assert [chosen(base) for base in (torch.float32, torch.float16, torch.float64)] == [torch.float32] * 3
    assert chosen(torch.float32, dtype="bfloat16") == torch.bfloat16
    assert chosen(torch.bfloat16, dtype="float32") == torch.float32


def test_an_unknown_type_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="one of auto, float32, bfloat16, float16, not 'int4'"):
        Placement.choose("cpu", "int4")


def test_whole_numbers_keep_their_type():
    place = Placement(compute=torch.bfloat16, storage=torch.float16)
    assert place.put(torch.ones(2)).dtype == torch.float16
    assert place.put(torch.ones(2, dtype=torch.long)).dtype == torch.long
    batch = place.batch({"pixel_values": torch.ones(1), "input_ids": torch.ones(1, dtype=torch.long)})
    assert [tensor.dtype for tensor in batch.values()] == [torch.bfloat16, torch.long]
