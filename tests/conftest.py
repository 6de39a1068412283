"""Settings for every test: no network, one seed, quiet libraries, one folder for what is made once."""

import os

# Where Python keeps nothing of what it compiles, every process that a test starts compiles torch anew: 12 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Products in bfloat16 crash on some machines without this; it must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

import massmerge
from massmerge.io.allocator import keep_buffers
from models import family_bundle, with_options

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)  # tests run in parallel processes
keep_buffers()  # as our own processes do: else a fifth of the time goes to the system, which hands out the same pages again


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """The folder of bundles that are made once a run (`text_bundle(root)` and the like)."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def bert(root):
    """A loaded bundle of three tasks of a tiny BERT."""
    return massmerge.load(family_bundle(root, "bert"))


@pytest.fixture(scope="session")
def load_vit(root, tmp_path_factory):
    """A function that loads a bundle of three tasks of a tiny ViT with other options of the router."""

    def load(**router):
        folder = tmp_path_factory.mktemp("vit") / "bundle"
        return massmerge.load(with_options(family_bundle(root, "vit"), folder, router=router))

    return load
