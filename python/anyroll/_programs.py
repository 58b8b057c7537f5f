"""The programs of this package, and the torch of this interpreter."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent / "bin"
LAUNCHER = FOLDER / "anyroll"
TORCH_LIB = "ANYROLL_TORCH_LIB"


def torch_lib() -> Path | None:
    """Returns the folder of torch's libraries, without importing torch."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    folders = [Path(place) / "lib" for place in places or []]
    return next((lib for lib in folders if (lib / "libtorch_cpu.so").is_file()), None)


def environment() -> dict[str, str]:
    """Returns the variables for the programs.

    They get this interpreter's torch, unless it lies beside them, where they find it. A virtual environment's programs come
    first, so that `python3` of a reward is this interpreter.
    """
    variables = dict(os.environ)
    beside = FOLDER / "../../torch/lib"
    if TORCH_LIB not in variables and not beside.exists() and (lib := torch_lib()):
        variables[TORCH_LIB] = str(lib)
    if sys.prefix != sys.base_prefix:
        folders = [str(Path(sys.prefix) / "bin"), *filter(None, [variables.get("PATH")])]
        variables["PATH"] = os.pathsep.join(folders)
    return variables


def main() -> NoReturn:
    """Becomes `anyroll`, so that signals and the exit code are its own."""
    try:
        os.execve(LAUNCHER, ["anyroll", *sys.argv[1:]], environment())
    except OSError as error:
        sys.exit(f"error: {LAUNCHER} does not start: {error.strerror}; install the package again")
