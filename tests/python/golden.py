"""What the scripts that write golden files of tiny models have in common."""

import json
from pathlib import Path

from safetensors.torch import save_file


def write(folder, configs, golden):
    """Writes to tests/golden/`folder` a file NAME.safetensors for each of `configs`, with the tensors that `golden` makes of
    it, and the configs themselves."""
    out = Path(__file__).parent.parent / "golden" / folder
    out.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        tensors = {key: tensor.detach().contiguous() for key, tensor in golden(config).items()}
        save_file(tensors, out / f"{name}.safetensors")
    (out / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")
