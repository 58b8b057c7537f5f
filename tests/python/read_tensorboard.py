"""Prints the scalars and texts of a folder of event files as JSON, read by the `tensorboard` package itself.

usage: python read_tensorboard.py RUN/tensorboard

    {"scalars": {"reward/mean": [[0, 0.12], [1, 0.15]], ...}, "texts": {...}}

Points that a resumed run replaced are not there: the package drops them, as TensorBoard does.
"""

import json
import math
import sys

from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
from tensorboard.util import tensor_util


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    # Zero means: keep every point.
    events = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [[event.step, finite(event.value)] for event in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: [[event.step, text(event.tensor_proto)] for event in events.Tensors(tag)] for tag in tags["tensors"]}
    json.dump({"scalars": scalars, "texts": texts}, sys.stdout, allow_nan=False)


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinities."""
    return value if math.isfinite(value) else None


def text(tensor) -> str:
    return tensor_util.make_ndarray(tensor).item().decode()


if __name__ == "__main__":
    main()
