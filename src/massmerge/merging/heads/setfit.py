"""SetFit models: the body is a model of sentence-transformers; the head is a pickle, which is never opened."""

from __future__ import annotations

from massmerge.checkpoints import Source
from massmerge.checkpoints.sources import SETFIT
from massmerge.errors import InputError

_PICKLE = "model_head.pkl"
_CONVERSION = """\
    import joblib, numpy, torch; from safetensors.torch import save_file
    head = joblib.load("{path}"); rows = len(head.classes_) == 2  # two classes share one row of numbers
    weight, bias = (numpy.concatenate([0 * x, x]) if rows else x for x in (head.coef_, head.intercept_))
    save_file({{"weight": torch.tensor(weight).float(), "bias": torch.tensor(bias).float()}}, "head.safetensors")"""


def refuse_setfit(source: Source) -> None:
    """Say how a head of SetFit is converted, where a recipe names no other.

    Raises:
        InputError: the source is a SetFit model.
    """
    path = source.around(_PICKLE) or source.around(SETFIT)
    if path is not None:
        raise InputError(
            f"{source.text}: its head is {_PICKLE}, a pickle of scikit-learn. Opening a pickle runs code, so it stays "
            "closed. Where you trust the file, convert it:\n"
            + _CONVERSION.format(path=path.with_name(_PICKLE))
            + "\n  and name it in the recipe, with the classes of `head.classes_` in order: "
            "`head: {weights: head.safetensors, labels: […]}`."
        )
