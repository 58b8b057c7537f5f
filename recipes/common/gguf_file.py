"""Reads GGUF files of version 2 and 3 with numpy: metadata, and tensors as float32."""

import struct

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9

# Layout of a block by the tensor's type: F32, F16, Q4_1 and Q8_0.
BLOCKS = {
    0: np.dtype([("values", "<f4", 1)]),
    1: np.dtype([("values", "<f2", 1)]),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)]),
    8: np.dtype([("scale", "<f2"), ("values", "i1", 32)]),
}
BLOCK_VALUES = {0: 1, 1: 1, 3: 32, 8: 32}


class Cursor:
    """A place in the file's header, which moves on with every read."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, kind):
        layout = struct.Struct("<" + SCALARS[kind])
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def text(self):
        length = self.scalar(10)
        self.at += length
        return bytes(self.data[self.at - length : self.at]).decode("utf-8")

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.scalar(4), self.scalar(10)
            return [self.value(inner) for _ in range(count)]
        return self.scalar(kind)


def read(path):
    """Returns the metadata, and each tensor's values by its name, in the order of the file."""
    with open(path, "rb") as file:
        data = memoryview(file.read())
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    cursor = Cursor(data)
    cursor.at = 4
    version = cursor.scalar(4)
    if version not in (2, 3):
        raise ValueError(f"{path} has version {version} of GGUF; 2 and 3 are read")
    tensor_count, key_count = cursor.scalar(10), cursor.scalar(10)
    metadata = {}
    for _ in range(key_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar(4))

    headers = []
    for _ in range(tensor_count):
        name = cursor.text()
        # The fastest dimension is first in the file, and last in numpy.
        shape = [cursor.scalar(10) for _ in range(cursor.scalar(4))][::-1]
        headers.append((name, shape, cursor.scalar(4), cursor.scalar(10)))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: dequantise(name, kind, data[start + offset :], shape) for name, shape, kind, offset in headers}
    return metadata, tensors


def dequantise(name, kind, data, shape):
    """Returns a tensor's values in float32, computed as the format defines them."""
    if kind not in BLOCKS:
        raise ValueError(f"{name} has GGUF's type {kind}; F32, F16, Q4_1 and Q8_0 are read")
    blocks = np.frombuffer(data, BLOCKS[kind], int(np.prod(shape)) // BLOCK_VALUES[kind])
    if kind == 3:
        # The low halves of the 16 bytes are the first 16 values, the high halves the others.
        nibbles = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1).astype(np.float32)
        values = widen(blocks["scale"]) * nibbles + widen(blocks["least"])
    elif kind == 8:
        values = widen(blocks["scale"]) * blocks["values"].astype(np.float32)
    else:
        values = blocks["values"].astype(np.float32)
    return values.reshape(shape)


def widen(column):
    return column.astype(np.float32)[:, None]
