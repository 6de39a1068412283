"""Windows and macOS: the package without what only Linux, or only POSIX, has."""

import subprocess
import sys
from pathlib import Path

import pytest

import massmerge

# What Windows does not have is taken away once the libraries, which are those of this system, have been imported.
WINDOWS = """
import asyncio, ctypes, importlib, os, pkgutil, shutil, signal, sys, warnings
import filelock, scipy.linalg, torch, uvicorn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

for name in ("fork", "forkpty", "register_at_fork", "nice", "getuid", "geteuid", "fchmod",
             "posix_fadvise", "sched_getaffinity", "sched_setaffinity", "killpg", "getpgid"):
    delattr(os, name) if hasattr(os, name) else None
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty"):
    sys.modules[name] = None
del signal.SIGHUP
shutil._use_fd_functions = False
filelock.FileLock = filelock.SoftFileLock  # whose file goes when it is released, as there

def no_handler(self, *arguments):
    raise NotImplementedError

asyncio.SelectorEventLoop.add_signal_handler = no_handler
real_open, real_rename, real_unlink, real_library = os.open, os.rename, os.unlink, ctypes.CDLL.__init__

def open_file(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real_open(path, *arguments, **options)

def rename(source, target, **options):
    if os.path.lexists(target):
        raise FileExistsError(17, "File exists", str(source), None, str(target))
    real_rename(source, target, **options)

def unlink(path, **options):
    caller = sys._getframe(1)
    while caller and "filelock" not in caller.f_code.co_filename:
        caller = caller.f_back
    if caller is None and os.path.basename(path) == "lock":  # open as long as it is held
        raise PermissionError(13, "Permission denied", str(path))
    real_unlink(path, **options)

def library(self, name, *arguments, **options):
    if name is None and "massmerge" in sys._getframe(1).f_code.co_filename:
        raise TypeError("argument of type 'NoneType' is not iterable")
    real_library(self, name, *arguments, **options)

os.open, os.rename, os.unlink, ctypes.CDLL.__init__ = open_file, rename, unlink, library
# Text is UTF-8 by our own word: on Windows it would be what the language of the system asks for.
warnings.filterwarnings("error", category=EncodingWarning, module="massmerge")
"""
EVERY_MODULE = """
import massmerge
modules = [found.name for found in pkgutil.walk_packages(massmerge.__path__, "massmerge.")]
for name in modules:
    importlib.import_module(name)
print(len(modules))
"""
MERGE_AND_ANSWER = """
import massmerge
from massmerge.cli.demo.example import make_example
folder = __import__("pathlib").Path(sys.argv[1])
recipe = make_example(folder)
massmerge.merge(recipe, folder / "out", workers=2)
massmerge.merge(recipe, folder / "other" / "out", workers=1)
massmerge.remove(folder / "out", "mood")  # in place: two renames
print(*sorted(path.name for path in folder.iterdir()), *(p.name for p in (folder / "other").iterdir()))
print(*(answer.task for answer in massmerge.load(folder / "other" / "out").predict(["free prize, call now"] * 2)))
"""
SERVE = """
from massmerge.serve.server import bind, run
from massmerge.serve.settings import ServiceSettings
settings = ServiceSettings(folder / "other" / "out", port=0)
run(settings, bind(settings), lambda: signal.raise_signal(signal.SIGTERM))
print("stopped")
"""


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder, and the lines that one process printed there in which this system is made to look like Windows.

    One for all tests: each would import the libraries anew.
    """
    folder = tmp_path_factory.mktemp("windows")
    code = WINDOWS + EVERY_MODULE + MERGE_AND_ANSWER + SERVE
    words = [sys.executable, "-X", "warn_default_encoding", "-c", code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout.splitlines()


def test_every_module_is_imported_without_what_only_posix_has(windows):
    package = Path(massmerge.__file__).parent
    assert int(windows[1][0]) == sum(path != package / "__init__.py" for path in package.rglob("*.py"))


def test_a_family_is_merged_and_answers_without_what_only_posix_has(windows):
    folder, (_, names, answers, _) = windows
    plain = massmerge.load(folder / "other" / "out").predict(["free prize, call now"] * 2)
    assert answers.split() == [answer.task for answer in plain]
    assert names == "base mood other out recipe.yaml spam topic out", "no work folder is left behind"


def test_the_service_starts_and_stops_without_signals_of_the_loop(windows):
    assert windows[1][-1] == "stopped"
