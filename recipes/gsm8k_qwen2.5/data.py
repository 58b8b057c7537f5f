"""GSM8K and Qwen2.5's instruction models, by the command `hf` of the package huggingface_hub."""

import shutil
import subprocess
import sys
from pathlib import Path

MODELS, DATA = Path(".recipes/models"), Path(".recipes/data/gsm8k")
NAMES = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")


def ensure(folder, *download):
    """Downloads into a folder, unless it is there. `hf` continues an interrupted download."""
    if folder.is_dir():
        return
    beside = Path(sys.executable).with_name("hf")
    program = str(beside) if beside.is_file() else shutil.which("hf")
    if program is None:
        raise SystemExit(f"{folder} is not there, and neither is the command hf: pip install huggingface_hub")
    aside = folder.with_name(folder.name + ".part")
    done = subprocess.run([program, "download", *download, "--local-dir", str(aside)])
    if done.returncode != 0:
        raise SystemExit(f"hf could not download {' '.join(download)}; the folder can also be copied to {folder}")
    aside.rename(folder)


for name in NAMES:
    ensure(MODELS / name.split("/")[1], name)
ensure(DATA, "openai/gsm8k", "--repo-type", "dataset")
