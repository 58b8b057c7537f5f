"""A copy of a decoder's folder with some of its layers, in the bytes of its own tensors."""

import json
import re
import shutil
import struct

LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def ensure(folder, shorter, layers):
    """Makes the folder `shorter` unless it is there."""
    if shorter.is_dir():
        return
    aside = shorter.with_name(shorter.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    keep_layers(sorted(folder.glob("*.safetensors")), aside / "model.safetensors", layers)
    config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(layers)
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    aside.rename(shorter)
    print(f"{shorter}: layers {', '.join(map(str, layers))} of {folder}")


def keep_layers(files, to, layers):
    """Writes the tensors of `layers`, numbered anew, and those of no layer."""
    new_numbers = {old: new for new, old in enumerate(layers)}
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for file in files:
        data = file.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        for name, tensor in sorted(json.loads(data[8 : 8 + length]).items()):
            found = LAYER.fullmatch(name)
            if name == "__metadata__" or found and int(found[1]) not in new_numbers:
                continue
            begin, end = tensor["data_offsets"]
            parts.append(data[8 + length + begin : 8 + length + end])
            new_name = f"model.layers.{new_numbers[int(found[1])]}.{found[2]}" if found else name
            header[new_name] = {**tensor, "data_offsets": [at, at + end - begin]}
            at += end - begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(to, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            file.write(part)
