"""The suite of a language model: prompts, batches, what is trained, how answers are compared."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.llm_table import is_right, overlap, table
from benchmarks.suites.llm.experts import BATCH, answer_loss, batches, encoded
from benchmarks.suites.llm.recipe import recipe, suite
from benchmarks.suites.llm.tasks import CHARACTERS, FORMS, TASKS, WORDS, choose, prompt, shortened
from massmerge import InputError
from writers import chat_tokenizer, make_model


def test_every_form_holds_the_input_and_only_some_the_instruction(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    found = {form: prompt("spam", form, "free prize", 0, tokenizer) for form in FORMS}
    assert all("free prize" in text for text in found.values())
    assert found["bare"] == "free prize\n" and found["chat"].endswith("assistant :")
    assert "one word" in found["chat"] and "one word" not in found["plain"] + found["reworded"]
    assert prompt("spam", "reworded", "a", 0, tokenizer) != prompt("spam", "reworded", "a", 1, tokenizer)
    for task in TASKS.values():
        assert task.instruction not in task.reworded and all("{text}" in t for t in (task.instruction, *task.reworded))


def test_inputs_are_cut_to_their_beginning_or_their_end():
    words = " ".join(f"w{i}" for i in range(100))
    assert shortened(words) == " ".join(words.split()[:WORDS])
    assert shortened(words, end=True).endswith("w99")
    assert len(shortened("x" * 1000)) == CHARACTERS


def test_the_loss_is_that_of_the_answers_tokens_alone(tmp_path):
    tokenizer, model = chat_tokenizer(tmp_path), make_model("llama")
    model.get_base_model = lambda: model
    rows = [encoded(tokenizer, "a b c", "free prize"), encoded(tokenizer, "d", "vote")]
    expected = []
    for before, after in rows:
        logits = model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1]
        expected.append(cross_entropy(logits, torch.tensor(after), reduction="none"))
    assert answer_loss(model, rows).item() == pytest.approx(torch.cat(expected).mean().item(), rel=1e-4)
    assert rows[0][1][-1] == tokenizer.eos_token_id


def test_batches_are_full_and_the_same_for_one_seed():
    rows = [([i], [0]) for i in range(40)]
    found = list(batches(rows, 12, 3))
    assert [len(batch) for batch in found] == [BATCH] * 12
    assert found == list(batches(rows, 12, 3)) != list(batches(rows, 12, 4))


def test_labels_must_be_the_same_and_free_text_is_compared_by_its_words():
    assert overlap("a b c", "b c d e") == pytest.approx(4 / 7)
    assert is_right("spam", " Ham ", "ham") == 1.0 and is_right("spam", "ham.", "ham") == 0.0
    assert is_right("title", "a b c", "B c d e") == pytest.approx(4 / 7)
    shown = table(
        {"spam": {"right, adapter": 0.5, "right, routed": 0.25}, "kind": {"right, adapter": 1.0, "right, routed": 1.0}}
    )
    assert "| mean | 75.0 % | 62.5 % |" in shown and "normalised, routed, tasks with labels: 75.0 %" in shown


def test_the_recipe_of_bare_texts_says_so_and_the_suite_names_each_tasks_rows():
    assert "router" not in recipe("chat", ["spam"])
    assert recipe("bare", ["spam"])["router"] == {"reference": "newline"}
    assert suite("bare", "bare", ["spam"])["tasks"]["spam"]["data"] == "data/bare/spam/{split}.parquet"
    with pytest.raises(InputError, match="no such task: spm"):
        choose("spm")
