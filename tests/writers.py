"""Tiny models that generate, experts of them, and what transformers alone generates with a checkpoint."""

from pathlib import Path

import tokenizers
import torch
import transformers as tf

import massmerge
from models import FAMILIES, backbone_of, dense_changes, rows_of, write_recipe
from naive import tsv_merge

CLASSES = {"t5": tf.T5ForConditionalGeneration, "gpt2": tf.GPT2LMHeadModel, "llama": tf.LlamaForCausalLM}
KINDS = ["t5", "t5 untied", "gpt2", "llama untied"]
NEW = 6


def make_model(kind: str) -> tf.PreTrainedModel:
    name, _, untied = kind.partition(" ")
    config = FAMILIES[name].make_config(tie_word_embeddings=not untied)
    model = CLASSES[name](config).eval()
    if untied and name == "t5":  # as in version 1.1, whose class would tie it all the same
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def shifted(model: tf.PreTrainedModel, seed: int, scale: float) -> tf.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def dense_tokens(model, row, **options) -> list[int]:
    """What transformers generates with a plain checkpoint, without the prompt."""
    ids = row["input_ids"][None]
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)[0].tolist()
    written = out[1:] if model.config.is_encoder_decoder else out[ids.shape[1] :]
    end = model.generation_config.eos_token_id
    return written[: written.index(end) + 1] if end in written else written


def prompts(kind: str, count: int = 5) -> list[dict]:
    """Prompts of different lengths, so that batches are padded."""
    rows = rows_of(FAMILIES[kind.partition(" ")[0]].make_inputs(count))
    return [{"input_ids": row["input_ids"][: 3 + i % 5]} for i, row in enumerate(rows)]


def make_writers(folder, kind: str, tasks: str = "ab") -> dict[str, dict[str, torch.Tensor]]:
    """A base and experts of it that write, saved; their tensors by name, tied ones under each of their names."""
    base = shifted(make_model(kind), 1, 0.3)
    base.save_pretrained(folder / "base")
    states = {"base": base.state_dict()}
    for seed, task in enumerate(tasks):
        expert = make_model(kind)
        expert.load_state_dict(base.state_dict())
        shifted(expert, 10 + seed, 0.1).save_pretrained(folder / task)
        states[task] = expert.state_dict()
    return states


def naive_sum(states, scale: float = 0.3) -> dict[str, torch.Tensor]:
    return {n: b + scale * sum(states[t][n] - b for t in "ab") for n, b in states["base"].items()}


TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<s>{% endif %}{{ message['role'] }} : {{ message['content'] }} ;"
    "{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"
)
WORDS = ["system", "user", "assistant", ":", ";", *"abcdefgh", "free", "prize", "team", "vote", "sad", "film"]


def chat_tokenizer(folder, template: str | None = TEMPLATE) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of a few words that begins every text with `<s>`, as Llama's does, saved to a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **named)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_chat_writers(folder, tasks: str = "abc", template: str | None = TEMPLATE) -> None:
    """A tiny Llama that chats and LoRA adapters of it, with random starts of their own."""
    from peft import LoraConfig, get_peft_model

    base = shifted(make_model("llama"), 1, 0.3)
    base.save_pretrained(folder / "base")
    chat_tokenizer(folder / "base", template)
    for seed, task in enumerate(tasks):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        adapter = get_peft_model(tf.LlamaForCausalLM.from_pretrained(folder / "base"), config)
        with torch.no_grad():
            for name, parameter in adapter.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
        adapter.save_pretrained(folder / task)


def writer_bundle(root: Path, kind: str) -> Path:
    """A bundle of three experts (a, b, c) that write, made once a run; its sources lie beside it. Decoders read text."""
    folder = root / f"writer-{kind.replace(' ', '-')}"
    if not folder.exists():
        make_writers(folder, kind, "abc")
        if not kind.startswith("t5"):
            letter_tokenizer().save_pretrained(folder / "base")
        massmerge.merge(write_recipe(folder, list("abc"), rank=8), folder / "bundle")
    return folder / "bundle"


def chat_bundle(root: Path) -> Path:
    """A bundle of a tiny Llama that chats, with three adapters (a, b, c) and a token a letter; made once a run."""
    folder = root / "writer-chat"
    if not folder.exists():
        make_chat_writers(folder)
        tokenizer = letter_tokenizer()
        tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 200
        tokenizer.save_pretrained(folder / "base")
        massmerge.merge(write_recipe(folder, list("abc")), folder / "writers")
    return folder / "writers"


def letter_tokenizer() -> tf.PreTrainedTokenizerFast:
    """A tokenizer with a token for each of 57 bytes: letters, blanks, two that only make a character together."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?:;-+*/=()<>", "\u0120", "\u010a", "\u00c3", "\u00a9", "#", "_"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=40
    )


def dense_writer(bundle, kind, tasks) -> tf.PreTrainedModel:
    """A plain checkpoint of a set: dense TSV-M of its factors, the mean of everything else, output layers included."""
    name = kind.partition(" ")[0]
    family = FAMILIES[name]
    base = family.base.from_pretrained(bundle.parent / "base").eval()
    model = CLASSES[name].from_pretrained(bundle.parent / tasks[0]).eval()
    changes = dense_changes(bundle, base, tasks, tsv_merge)
    inside = backbone_of(model, family.base)
    state = {k: changes.get(k, v) for k, v in base.state_dict().items() if not k.endswith("embed_tokens.weight")}
    if name == "llama":
        state["embed_tokens.weight"] = changes["embed_tokens.weight"]
    inside.load_state_dict(state, strict=False)  # a tied output layer is the same tensor
    if " untied" in kind:
        own = [CLASSES[name].from_pretrained(bundle.parent / task).lm_head.weight for task in tasks]
        model.lm_head.weight = torch.nn.Parameter(torch.stack(list(own)).mean(0))
    return model
