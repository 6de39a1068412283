"""Where an expert's files are not those of a fine-tuned base: what is refused, what is left out, what may be missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from massmerge.checkpoints.backbone import Base, Split, in_block, shape_listing
from massmerge.checkpoints.skeleton import Match, Skeleton
from massmerge.checkpoints.sources import Source
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo

_ALL = 200  # "every tensor that differs": cut only where a terminal would drown


def dispensable(skeleton: Skeleton, match: Match, parts: Split) -> list[str]:
    """Tensors that the file lacks and a backbone answers without: a pooler that nothing reads, a mask for pretraining."""
    missing = [name for name in match.missing if name in parts.backbone]
    computed = (
        getattr(skeleton.model, "_keys_to_ignore_on_save", None) or []
    )  # such as Marian's positions: sines, never stored
    return [
        n for n in missing if n.endswith("mask_token") or n in computed or (n.startswith("pooler.") and not parts.head)
    ]


def inside(names: list[str], skeleton: Skeleton, base: Base) -> list[str]:
    """Those tensors which a backbone would compute with if it had a place for them; the others stand beside it."""
    prefix = skeleton.submodule(type(base.skeleton.model)) or ""
    children = {name for name, _ in base.skeleton.model.named_children()}
    return [name for name in names if name.removeprefix(prefix).partition(".")[0] in children]


def left_out(source: Source, beside: Mapping[str, TensorInfo], head: Collection[str] | None) -> str | None:
    """What is told of tensors that belong to a class which somebody wrote around the backbone; nothing if all are used.

    Args:
        source: the expert.
        beside: the tensors.
        head: the layers among them that are the task's head; none if the recipe names no head.
    """
    rest = {n: info for n, info in beside.items() if n.rpartition(".")[0] not in (head or ())}
    if not rest:
        return None
    rows = [f"{name} {info.shape}" for name, info in rest.items()]
    layers = [
        name.removesuffix(".weight") for name, i in rest.items() if name.endswith(".weight") and len(i.shape) == 2
    ]
    hint = ""
    if head is None and layers and source.is_file:
        named = f"{{weights: {source.text}, layers: [{layers[0]}], labels: …}}"
        hint = f"\n  If one is this task's head, name it in the recipe: `head: {named}`."
    return f"its file holds more than the model, which is left out:{listing(rows)}{hint}"


def refuse_differences(
    skeleton: Skeleton, match: Match, parts: Split, base: Base, spare: list[str], strange: list[str]
) -> None:
    """One error with everything in which an expert's weights are not those of a fine-tuned base.

    Args:
        skeleton: the task's model.
        match: what the files give it.
        parts: which of it is backbone, which is head.
        base: the base.
        spare: tensors that the files may lack.
        strange: tensors inside the backbone that its class has no place for.
    """
    _refuse_strangers(skeleton, match, base)
    resized = {n: (a, b) for n, (a, b) in match.mismatched.items() if n in parts.head}
    if resized:
        raise InputError(
            f"its head's size does not match the {skeleton.config.num_labels} labels of its config.json "
            f"(shape in the file, shape by config.json):{shape_listing(resized)}\n"
            "  Correct id2label in the expert's config.json."
        )
    slots, ours = skeleton.slots, base.skeleton.slots
    shapes = {n: match.readings[n].info.shape if n in match.readings else slots[n].shape for n in parts.backbone}
    different = {b: (shapes[n], ours[b].shape) for n, b in parts.backbone.items() if shapes[n] != ours[b].shape}
    covered = set(parts.backbone.values())
    complaints = {
        "these differ in shape (expert against base)": shape_listing(different),
        "the expert lacks": listing((n for n in match.missing if n not in spare), _ALL),
        # An expert may do without what lies behind the blocks, such as a pooler, but not without a block.
        "the base has these, the expert does not": listing(
            (n for n in base.slots if n not in covered and in_block(n)), _ALL
        ),
        "the expert has these, the base does not": listing(parts.extra, _ALL),
        f"the expert has these, its class {skeleton.class_name} does not": listing(strange, _ALL),
    }
    found = [f"{title}:{rows}" for title, rows in complaints.items() if rows]
    others = [name for name in match.unexpected if name not in strange]
    if found and others:
        found.append(f"the expert has these besides:{listing(others, _ALL)}")
    if different and all(ours[n].kind == "embedding" and _other_rows(s) for n, s in different.items()):
        found.append("The vocabulary has another size: resize the expert's embeddings to the base's.")
    if found and skeleton.submodule(type(base.skeleton.model)) is None:
        found.insert(0, f"it is a {skeleton.class_name}, the base is a {base.skeleton.class_name}.")
    if found:
        raise InputError("not a fine-tuned version of the base: " + "\n  ".join(found))


def _refuse_strangers(skeleton: Skeleton, match: Match, base: Base) -> None:
    """Refuse weights of which none has a name of the base's, in fewer words than a list of all of them."""
    if match.readings or not match.unexpected:
        return
    raise InputError(
        f"not a fine-tuned version of the base: none of its {len(match.unexpected)} tensors has a name that a "
        f"{base.skeleton.class_name} knows. It holds{listing(match.unexpected, 4)}\n  The base has"
        f"{listing(base.slots, 4)}\n  If it is the same architecture under other names, rename them; else use its own base."
    )


def _other_rows(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether two embeddings differ in the number of their rows only."""
    return shapes[0][1:] == shapes[1][1:]
