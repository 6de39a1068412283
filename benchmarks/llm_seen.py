"""What every site of SmolLM2 sees of the prompts of the suite: `python benchmarks/llm_seen.py [--split test] [--rows 20]`.

Adapters do not change what the first pass of the base sees, so rules of routing are compared on kept activations, by
`benchmarks/llm_routing.py`. Forms are those of the suite and `turns`: a prompt after a turn of another task. References
are inputs of no task, as chats and as bare lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.suites.llm.backbone import folder, make_base
from benchmarks.suites.llm.tasks import FORMS, TASKS, data_folder, make_data
from benchmarks.suites.splits import read_split
from massmerge.model.chat import empty_prompt, render
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.routing import find_sites

Token = Literal["mean", "last", "content", "ending"]
"""The mean over all tokens, the last one; the mean over the user's own, and over those of the template behind them."""
TOKENS: tuple[Token, ...] = get_args(Token)
SHORT = ("hello", ".", "ok", "yes", "no", "thanks", "?", "123", "a", "the", "this", "it is", "and so on", "something",
         "see below", "text", "one two three", "well", "-", "x", "good morning", "again", "here", "some words")  # fmt: skip
REQUESTS = (
    "Translate this sentence into French.\n\nThe train leaves at nine.", "What is the capital of Australia?",
    "Write a short poem about the sea.", "Explain how a bicycle works.", "Tell me a joke.",
    "Correct the grammar: he go to school every days.", "Give me a recipe for pancakes.",
    "Here is a list of numbers: 4, 8, 15, 16. What comes next?", "How many days are there in March?",
    "Rewrite the following more politely.\n\nSend me the file now.", "Who wrote Hamlet?",
    "Summarize: The council met on Monday to talk about the new bridge and agreed to vote next week.",
    "What should I wear when it is cold outside?", "List three uses of a paper clip.", "Name a synonym of quick.",
    "Write a function that adds two numbers.", "Can you help me plan a trip to Japan in spring?",
    "Is the following true? Water boils at a lower temperature on a mountain.", "What does the word ambiguous mean?",
    "Continue the story: The door opened slowly and", "Convert 5 miles to kilometres.",
    "The quarterly figures are attached. Please have a look.\n\nDraft an answer.", "Compare cats and dogs.",
    "I feel tired today. What can I do?", "Describe a picture of a dog on a beach.",
    "Find the verb in this sentence: Birds sing in the morning.", "Give advice to a new employee.",
    "{\"name\": \"Ann\", \"age\": 31}\nTurn this into a sentence.", "Say hello in five languages.",
    "What are the pros and cons of working at home?", "Extract the date: We meet on 3 May at noon.",
    "Please shorten this text.\n\nIt was, all things considered, a rather good day for everyone.",
)  # fmt: skip
Seen = dict[str, Tensor]
"""By voter, activations (prompts, width)."""


def kept(split: str) -> Path:
    """Where the activations of a split are kept."""
    return folder() / f"seen-{split}.pt"


def prompts_of(split: str, rows: int, tokenizer: Any) -> Iterator[tuple[str, list[str]]]:
    """By form and task, the prompts."""
    found: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    for form in FORMS:
        found[form] = {}
        for task in TASKS:
            make_data(task)
            prompts, answers = read_split(data_folder(form, task), split, "text")
            found[form][task] = prompts[:rows], answers[:rows]
            yield f"{form} {task}", prompts[:rows]
    names = list(TASKS)
    for place, task in enumerate(names):
        before, answers = found["chat"][names[place - 1]]
        own = found["chat"][task][0]
        # The later turn without the system prompt, which stands at the beginning once.
        yield (
            f"turns {task}",
            [
                f"{first}{answer}<|im_end|>\n{second[second.index('<|im_start|>user') :]}"
                for first, answer, second in zip(before, answers, own, strict=True)
            ],
        )


def references_of(tokenizer: Any, base: Any) -> Iterator[tuple[str, list[str]]]:
    """Inputs of no task: the empty prompt, random words, short and general requests, and what the base itself would ask."""
    empty = empty_prompt(tokenizer) or ""
    draw = torch.Generator().manual_seed(0)
    words = [tokenizer.decode(torch.randint(49152, (16,), generator=draw)) for _ in range(32)]
    yield "reference template", [empty]
    yield "reference newline", ["\n"]
    yield "reference words", words
    asked = own_requests(tokenizer, base, empty.partition("<|im_start|>user\n")[0] + "<|im_start|>user\n")
    for name, texts in (("short", SHORT), ("requests", REQUESTS), ("asked", asked), ("random", words)):
        yield f"reference {name}", [render(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        yield f"reference bare {name}", [text.replace("\n", " ") + "\n" for text in texts]


@torch.inference_mode()
def own_requests(tokenizer: Any, base: Any, begin: str) -> list[str]:
    """What the base writes in the place of the user, sampled."""
    torch.manual_seed(0)
    ids = tokenizer(begin, return_tensors="pt", add_special_tokens=False)
    written = base.generate(**ids, do_sample=True, num_return_sequences=32, max_new_tokens=32)
    return [text.strip() for text in tokenizer.batch_decode(written[:, ids["input_ids"].shape[1] :], True)]


def pooled(z: Tensor, tokens: Sequence[int], empty: Sequence[int]) -> Tensor:
    """What the voters of a site take (4, width) of its activation of a prompt.

    Args:
        z: of each token (n, width).
        tokens: the prompt.
        empty: the prompt that says nothing; what stands before and behind the user's words is the same in both.
    """
    before, behind = _shared(tokens, empty), max(1, _shared(tokens[::-1], empty[::-1]))
    begin = min(max(before, 1), max(0, len(tokens) - behind - 1))  # the first token of any text is an outlier
    content = z[begin : len(tokens) - behind] if len(tokens) > behind else z
    return torch.stack([z.mean(0), z[-1], content.mean(0), z[-behind:].mean(0)])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def main() -> None:
    """Run the first pass on all prompts and keep what the sites see."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--rows", type=int, default=20)
    options = parser.parse_args()
    base = make_base()
    tokenizer = AutoTokenizer.from_pretrained(base)
    language: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    first = FirstPass(language.model, [Voter(site, "each") for site in find_sites(language.model)])
    chat, bare = tokenizer(empty_prompt(tokenizer) or "").input_ids, tokenizer("\n").input_ids
    found: dict[str, Seen] = {}
    asked = [*prompts_of(options.split, options.rows, tokenizer), *references_of(tokenizer, language)]
    for name, prompts in tqdm(asked, mininterval=20):
        parts: dict[str, list[Tensor]] = {}
        for at in range(0, len(prompts), 5):
            texts = prompts[at : at + 5]
            tokens = [tokenizer(text).input_ids for text in texts]
            for voter, seen in zip(
                first.voters, first(dict(tokenizer(texts, padding=True, return_tensors="pt"))), strict=True
            ):
                each = seen.rows.split([len(own) for own in tokens])
                of = [
                    pooled(z, own, chat if text.startswith("<|im_start|>") else bare)
                    for z, own, text in zip(each, tokens, texts, strict=True)
                ]
                parts.setdefault(voter.site.name, []).append(torch.stack(of).half())
        found[name] = {
            f"{site}.{token}": torch.cat(rows)[:, place].clone()
            for site, rows in parts.items()
            for place, token in enumerate(TOKENS)
        }
    torch.save(found, kept(options.split))


if __name__ == "__main__":
    main()
