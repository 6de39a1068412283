"""A small real T5: a base and one expert a task, trained here, merged, and compared answer by answer with the experts.

    python benchmarks/tiny_t5.py            trains what is missing, evaluates, prints the table of docs/generate.md

Three tasks of the text suite (`make suite-text` fetches them) in text-to-text form: the text is the prompt, with nothing in
it that names the task, and the name of the label is the answer. The tokenizer is MiniLM's, cut to the pieces that these
tasks use most. The base is trained on the mix, half of it filling in masked words; its word embeddings start as MiniLM's,
cut to their first directions. Then each expert goes on from the base with its own task. Everything is seeded and is kept in
~/.cache/massmerge/tiny_t5, outside of the repository.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from pyarrow import parquet
from tqdm import tqdm
from transformers import AutoTokenizer, BertTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

import massmerge
from massmerge.io.tensor_file import read_header, read_tensor

SUITE = Path("~/.cache/massmerge/suites/text").expanduser()
TASKS = ("products", "surnames", "questions")
WIDTH, LAYERS, TOKENS, BATCH, PIECES = 128, 4, 24, 32, 4000
BASE_STEPS, EXPERT_STEPS = 600, 400
ROWS = 100  # test rows of each task
PLACE = Path(f"~/.cache/massmerge/tiny_t5/{'-'.join(TASKS)}-{LAYERS}-{BASE_STEPS}-{EXPERT_STEPS}").expanduser()

Pair = tuple[str, str]


def pairs(task: str, split: str) -> list[Pair]:
    """Prompts and answers of a task."""
    rows = parquet.read_table(SUITE / "data" / task / f"{split}.parquet").to_pylist()
    return [(" ".join(row["text"].split()), row["label"].lower()) for row in rows]


def masked(text: str, chance: random.Random) -> Pair:
    """A text with a few words masked, and those words."""
    words = text.split()
    hidden = sorted(chance.sample(range(len(words)), max(1, len(words) // 6)))
    shown = ["[MASK]" if i in hidden else word for i, word in enumerate(words)]
    return " ".join(shown), " ".join(words[i] for i in hidden)


def train(
    model: T5ForConditionalGeneration,
    tokenizer: BertTokenizerFast,
    batches: Iterator[list[Pair]],
    rate: float,
    steps: int,
) -> None:
    """Plain fine-tuning: AdamW, a short warm-up, then down to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 50, (steps - i) / steps))
    for _ in tqdm(range(steps), leave=False, mininterval=10):
        prompts, answers = zip(*next(batches), strict=True)
        inputs = tokenizer(list(prompts), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        labels = tokenizer(list(answers), padding=True, truncation=True, max_length=8, return_tensors="pt").input_ids[
            :, 1:
        ]
        loss = model(**inputs, labels=labels.masked_fill(labels == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def mixed_batches(data: dict[str, list[Pair]], chance: random.Random) -> Iterator[list[Pair]]:
    """Batches of all tasks: every second pair fills in masked words."""
    tasks = list(data)
    while True:
        drawn = [chance.choice(data[chance.choice(tasks)]) for _ in range(BATCH)]
        yield [masked(text, chance) if i % 2 else (text, answer) for i, (text, answer) in enumerate(drawn)]


def task_batches(data: list[Pair], chance: random.Random) -> Iterator[list[Pair]]:
    """Batches of one task."""
    while True:
        yield chance.sample(data, BATCH)


def make_tokenizer(data: dict[str, list[Pair]]) -> BertTokenizerFast:
    """MiniLM's tokenizer with its letters and the word pieces that are used most."""
    whole = AutoTokenizer.from_pretrained(SUITE / "base")
    used = Counter(i for rows in data.values() for pair in rows for text in pair for i in whole(text)["input_ids"])
    answers = {i for rows in data.values() for _, answer in rows for i in whole(answer)["input_ids"]}
    names = whole.convert_ids_to_tokens(range(len(whole)))
    letters = {i for i, name in enumerate(names) if len(name.removeprefix("##")) == 1 and name.isascii()}
    often = {i for i, _ in used.most_common(PIECES)}
    kept = [i for i in range(len(names)) if i in letters | often | answers | set(whole.all_special_ids)]
    PLACE.mkdir(parents=True, exist_ok=True)
    (PLACE / "vocab.txt").write_text("".join(names[i] + "\n" for i in kept), encoding="utf-8")
    inputs = ["input_ids", "attention_mask"]
    return BertTokenizerFast(vocab=str(PLACE / "vocab.txt"), model_max_length=512, model_input_names=inputs)


def new_base(tokenizer: BertTokenizerFast) -> T5ForConditionalGeneration:
    """A T5 with MiniLM's word embeddings in fewer dimensions, and all else random."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_ff=4 * WIDTH, d_kv=32, num_layers=LAYERS, num_heads=4,
                      dropout_rate=0.05, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.sep_token_id,
                      decoder_start_token_id=tokenizer.pad_token_id)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    words = read_tensor(read_header(SUITE / "base" / "model.safetensors")["embeddings.word_embeddings.weight"]).float()
    whole = AutoTokenizer.from_pretrained(SUITE / "base")
    words = words[whole.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))]
    words = words - words.mean(0)
    directions = torch.linalg.eigh(words.mT @ words).eigenvectors[:, -WIDTH:]
    reduced = words @ directions
    with torch.no_grad():
        model.shared.weight.copy_(reduced / reduced.std())
    return model


def build() -> dict[str, float]:
    """Train base and experts where they are missing, and merge; returns seconds."""
    seconds = {}
    data = {task: pairs(task, "train") for task in TASKS}
    tokenizer = make_tokenizer(data)
    if not (PLACE / "base" / "model.safetensors").is_file():
        began = time.process_time()
        base = new_base(tokenizer)
        train(base, tokenizer, mixed_batches(data, random.Random(0)), 2e-3, BASE_STEPS)
        base.save_pretrained(PLACE / "base")
        tokenizer.save_pretrained(PLACE / "base")
        seconds["base"] = time.process_time() - began
    for number, task in enumerate(TASKS):
        if not (PLACE / "experts" / task / "model.safetensors").is_file():
            began = time.process_time()
            torch.manual_seed(number)
            expert = T5ForConditionalGeneration.from_pretrained(PLACE / "base")
            train(expert, tokenizer, task_batches(data[task], random.Random(number)), 5e-4, EXPERT_STEPS)
            expert.save_pretrained(PLACE / "experts" / task)
            seconds[task] = time.process_time() - began
    recipe = PLACE / "recipe.yaml"
    recipe.write_text("base: base\ntasks:\n" + "".join(f"  - {{name: {t}, expert: experts/{t}}}\n" for t in TASKS))
    massmerge.merge(recipe, PLACE / "bundle", overwrite=True)
    return seconds


@torch.inference_mode()
def expert_answers(task: str, prompts: list[str]) -> list[str]:
    """What the expert writes by itself, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(PLACE / "base")
    expert = T5ForConditionalGeneration.from_pretrained(PLACE / "experts" / task).eval()
    found = []
    for start in range(0, len(prompts), 25):
        inputs = tokenizer(prompts[start : start + 25], padding=True, return_tensors="pt")
        found += tokenizer.batch_decode(expert.generate(**inputs, max_new_tokens=16), skip_special_tokens=True)
    return found


def evaluate() -> dict[str, dict[str, float]]:
    """Figures of each task, from one shuffled stream of all of them."""
    model = massmerge.load(PLACE / "bundle")
    test = {task: pairs(task, "test")[:ROWS] for task in TASKS}
    stream = [(task, prompt, answer) for task in TASKS for prompt, answer in test[task]]
    random.Random(0).shuffle(stream)
    written = model.generate([prompt for _, prompt, _ in stream], batch_size=25, max_new_tokens=16)
    figures = {}
    for task in TASKS:
        prompts, truths = zip(*test[task], strict=True)
        own = dict(zip(prompts, expert_answers(task, list(prompts)), strict=True))
        given = model.generate(list(prompts), task=task, batch_size=25, max_new_tokens=16)
        rows = [(g, prompt, answer) for (t, prompt, answer), g in zip(stream, written, strict=True) if t == task]
        expected = ["".join(answer.split()) for answer in truths]
        figures[task] = {
            "task found": _share(g.task == task for g, _, _ in rows),
            "right": _share("".join(g.text.split()) == "".join(answer.split()) for g, _, answer in rows),
            "right, task given": _share("".join(g.text.split()) == e for g, e in zip(given, expected, strict=True)),
            "expert right": _share("".join(own[p].split()) == e for p, e in zip(prompts, expected, strict=True)),
            "same as expert": _share(g.text == own[prompt] for g, prompt, _ in rows),
            "same as expert, task given": _share(g.text == own[p] for g, p in zip(given, prompts, strict=True)),
        }
    figures["mean"] = {name: sum(f[name] for f in figures.values()) / len(TASKS) for name in figures[TASKS[0]]}
    return figures


def _share(hits: Iterable[bool]) -> float:
    found = list(hits)
    return sum(found) / len(found)


def main() -> None:
    """Build, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not (SUITE / "data" / TASKS[0]).is_dir():
        raise SystemExit(f"{SUITE}: no data there. `make suite-text` fetches it.")
    seconds = build()
    figures = evaluate()
    (PLACE / "result.json").write_text(json.dumps({"figures": figures, "seconds": seconds}, indent=1))
    print("| task | " + " | ".join(figures["mean"]) + " |")
    print("|---" * (len(figures["mean"]) + 1) + "|")
    for task, row in figures.items():
        print(f"| {task} | " + " | ".join(f"{100 * value:.1f} %" for value in row.values()) + " |")
    print(f"seconds of CPU: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items()) or 'all was there'}")


if __name__ == "__main__":
    main()
