"""Whether two artifacts hold the same numbers, tensor by tensor and bit by bit.

    python benchmarks/same_integers.py build/before/smollm2-int8 build/smollm2-int8

Make one with each of two commits by the same recipe; a restructuring must leave every weight and scale as it was. Reads
safetensors and the constants of `model.onnx`; exits with 1 at the first difference, and names it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.torch import load_file

from penjing.core.cli import guarded
from penjing.core.errors import InputError


def tensors(folder: Path) -> dict[str, NDArray[np.generic]]:
    """Every stored tensor of an artifact by its name; a number type that numpy lacks comes as its bytes.

    Raises:
        InputError: the folder holds no weights.
    """
    found: dict[str, NDArray[np.generic]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[name] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for path in sorted(folder.glob("*.onnx")):
        model = onnx.load(str(path))
        found |= {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        found["(nodes)"] = np.array(
            [f"{n.op_type} {list(n.input)} {list(n.output)}" for n in model.graph.node], dtype=np.str_
        )
    if not found:
        raise InputError(f"{folder} holds no weights; give the folder of an artifact")
    return found


def compare(first: Path, second: Path) -> int:
    """How many tensors two artifacts have, all alike.

    Raises:
        InputError: they differ; names the tensor.
    """
    one, other = tensors(first), tensors(second)
    if odd := sorted(one.keys() ^ other.keys()):
        raise InputError(f"{odd[0]} is in one of {first} and {second} alone")
    for name, values in one.items():
        if values.dtype != other[name].dtype or not np.array_equal(values, other[name]):
            raise InputError(f"{name} differs between {first} and {second}")
    return len(one)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    arguments = parser.parse_args()
    count = compare(arguments.first, arguments.second)
    print(f"{arguments.first} and {arguments.second}: {count} tensors, equal bit for bit", file=sys.stderr)
    print(json.dumps({"first": str(arguments.first), "second": str(arguments.second), "tensors": count}))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
