"""Weights of a folder in Hugging Face's layout, by the names that its `config.json` promises."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.manifest import check_inside, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def named_tensors(
    folder: Path,
    wanted: Mapping[str, torch.Size],
    unused: Collection[str] = (),
    integers: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `wanted`, each checked, in float32, in the order of the files; all names are compared first.

    Args:
        wanted: shape of each tensor by its name in the file.
        unused: names of tensors that may be there too, and are left out; one that ends with a dot stands for all that
            begin so.
        integers: the types of those that are no floating numbers; the others come in float32.

    Raises:
        InputError: missing, damaged, a pickle, not finite, or with other tensors than these.
    """
    places = dict(_places(folder))
    begins = tuple(name for name in unused if name.endswith("."))
    extra = {name for name in places.keys() - wanted.keys() - set(unused) if not name.startswith(begins)}
    if missing := sorted(wanted.keys() - places.keys()) or sorted(extra):
        what = "has no place in" if missing[0] in extra else "is missing of"
        raise InputError(f"{folder}: the tensor {missing[0]} {what} the model of its config.json; get it again")
    for file_name in sorted(set(places.values())):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in [name for name, place in places.items() if place == file_name and name in wanted]:
                tensor, shape = file.get_tensor(name), tuple(wanted[name])
                dtype = (integers or {}).get(name)
                if dtype is not None and tuple(tensor.shape) == shape and tensor.dtype == dtype:
                    yield name, tensor
                    continue
                fits = tuple(tensor.shape) == shape and tensor.is_floating_point() and dtype is None
                if not fits or not bool(tensor.isfinite().all()):
                    raise InputError(
                        f"{folder}: {name} has shape {tuple(tensor.shape)} and {tensor.dtype}, finite floating "
                        f"{shape} is needed; get the model again"
                    )
                yield name, tensor.to(torch.float32)


def stored_names(folder: Path) -> list[str]:
    """The names of all tensors in the folder.

    Raises:
        InputError: missing, damaged, or a pickle.
    """
    return [name for name, _ in _places(folder)]


def check_has_weights(folder: Path, loader: str) -> None:
    """Refuse a folder that holds no safetensors.

    Args:
        loader: the class of transformers that reads such models.

    Raises:
        InputError: it holds none; what to do where it holds a pickle.
    """
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code and is not read; get the "
            f"safetensors version, or convert it with transformers: {loader}.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)"
        )
    raise InputError(f"{folder} holds no {WEIGHTS}; it is not a model folder, or its making was not finished")


def _places(folder: Path) -> Iterator[tuple[str, str]]:
    """The file of each tensor."""
    names = [WEIGHTS]
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        map_ = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(map_, dict) or not all(isinstance(name, str) for name in map_.values()):
            raise InputError(f"{folder / INDEX} has no weight_map of tensor names to file names; get it again")
        names = sorted(set(map_.values()))
    else:
        check_has_weights(folder, "AutoModel")
    for name in names:
        check_inside(folder / INDEX, name)
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (no dict)
                    yield key, name
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{folder / name} is not a complete safetensors file ({error}); get it again") from error
