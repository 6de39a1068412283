"""The hub: which names are names there, and what the errors of its client mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from massmerge.errors import InputError, MassError

_REPOSITORY = r"[\w-][\w.-]*/[\w-][\w.-]*"
_REVISION = r"@[\w./-]+"
_TOKEN = re.compile(r"(Bearer |hf_)(?!hub_)[\w.~+/=-]{8,}")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def is_repository(text: str, *, with_revision: bool = True) -> bool:
    """Whether a text can be a repository with its owner: `me/name`, or `me/name@revision`."""
    return re.fullmatch(f"{_REPOSITORY}({_REVISION})?" if with_revision else _REPOSITORY, text) is not None


def split_revision(text: str) -> tuple[str, str | None]:
    """Repository and revision of a hub id; no revision is that of the branch `main`."""
    repo, _, revision = text.partition("@")
    return repo, revision or None


def client_options(token: str | None = None) -> dict[str, Any]:
    """What every call of the hub's client is told: who calls, and the token if it is not the saved one."""
    import massmerge

    return {"token": token, "library_name": "massmerge", "library_version": massmerge.__version__}


@contextmanager
def hub_errors(text: str) -> Iterator[None]:
    """Errors of the hub's client as errors of ours, about the repository that is called `text`."""
    try:
        yield
    except MassError:
        raise
    except Exception as error:  # the client passes on errors of whatever transport it uses
        raise _in_words(text, error) from error


def _in_words(text: str, error: Exception) -> MassError:
    from huggingface_hub import errors

    repo, revision = split_revision(text)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return InputError(f"{repo}: access must be requested on its page on the hub; then {_LOG_IN}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(f"{repo}: the hub has no such repository, or a private one. For that, {_LOG_IN}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{repo}: has no revision {revision or 'main'}. Give a branch, a tag or a full commit hash.")
    if status in (401, 403):
        return InputError(f"{repo}: the hub refused ({first_line(error)}). To write there, {_LOG_IN}.")
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return MassError(
            f"{text}: not in the hub's cache, and the hub cannot be reached. Download it once while online, and unset "
            "HF_HUB_OFFLINE for that."
        )
    if isinstance(error, errors.EntryNotFoundError):
        return InputError(f"{repo}: a file is not there ({first_line(error)}).")
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else None
    why = f"{first_line(error)} {first_line(cause)}" if isinstance(cause, Exception) else first_line(error)
    return MassError(f"{text}: the hub did not do it ({why}). Run the same command again to resume.")


def first_line(error: Exception) -> str:
    """The first line of what a library says, without tokens: a server may send back the one that it was sent."""
    return _TOKEN.sub(r"\1…", next(iter(str(error).strip().splitlines()), type(error).__name__))
