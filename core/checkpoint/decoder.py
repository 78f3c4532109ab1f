"""Checkpoint folders: `config.json`, safetensors weights under Hugging Face names, tokenizer files, `penjing.json`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penjing.core.checkpoint.named import INDEX, WEIGHTS, check_has_weights
from penjing.core.checkpoint.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from penjing.core.errors import InputError
from penjing.core.family import FAMILIES, SEEING, FamilyName, check_folder, family_of
from penjing.core.files import atomic_write_text
from penjing.core.manifest import MANIFEST_NAME, Manifest, check_inside, read_json_object, read_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf, token_ids
from penjing.core.models.tensor_names import MAX_EXPERTS, Slice, experts_in, model_name, stored_name
from penjing.core.vision.layout import Names, names_found, text_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class Checkpoint:
    """A model folder opened for reading; weights stay on disk until `get`. Of a decoder that sees it is the decoder.

    Attributes:
        folder: where it lies.
        config: the architecture.
        config_json: `config.json` as it stands.
        quantization: its `quantization_config`, or None where there is none or it is null.
        manifest: `penjing.json`, or None for a plain Hugging Face folder. Hashes are not checked here.
        tensor_names: names of all stored tensors in the model, in file order.
    """

    def __init__(
        self, folder: Path, read_config: Callable[[dict[str, Any], str], DecoderConfig] = decoder_config_from_hf
    ) -> None:
        self.folder = folder
        check_folder(folder)
        _check_family(folder)
        check_has_weights(folder, "AutoModelForCausalLM")
        self.config_json = read_json_object(folder / "config.json")
        self._within: Names | None = None  # of a decoder that sees, the decoder is opened
        architecture = self.config_json
        sees = architecture.get("model_type") in SEEING
        if sees:
            architecture = text_config(architecture, str(folder / "config.json"))
        self.config = _with_generation_stops(read_config(architecture, str(folder / "config.json")), folder)
        self.quantization = self._read_quantization()
        self.manifest: Manifest | None = read_manifest(folder) if (folder / MANIFEST_NAME).exists() else None
        self._readers: dict[str, Any] = {}
        self._file_of = self._locate_tensors()
        if sees:
            self._within = names_found(self.config_json["model_type"], self._file_of)
            parts = (self._within.decoder, self._within.head)
            self._file_of = {name: file for name, file in self._file_of.items() if name.startswith(parts)}
        count = 0 if self.config.moe is None else self.config.moe.num_experts
        self._slices: dict[str, Slice] = {}  # of experts that a tensor holds together, by their names one by one
        names: list[str] = []
        for stored in self._file_of:
            experts = self._experts_in(stored, count)
            self._slices |= experts
            if len(self._slices) > 3 * MAX_EXPERTS:
                raise InputError(f"{folder} holds more than {MAX_EXPERTS} experts; it is damaged")
            names += [self._name_in_model(name) for name in experts or (stored,)]
        self.tensor_names = tuple(names)

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name` in its stored dtype and shape, read from disk now.

        Raises:
            InputError: there is no such tensor, or its file cannot be read.
        """
        reader, stored, of_expert = self._locate(name)
        try:
            if of_expert is None:
                return reader.get_tensor(stored)
            rows = self.shape(name)[0]
            own = slice(of_expert.part * rows, (of_expert.part + 1) * rows)
            return reader.get_slice(stored)[of_expert.expert, own].clone()
        except SafetensorError as error:
            raise InputError(f"{self.folder / self._file_of[stored]}: cannot read {stored}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, without reading its data."""
        reader, stored, of_expert = self._locate(name)
        shape = tuple(reader.get_slice(stored).get_shape())
        if of_expert is None:
            return shape
        assert self.config.moe is not None
        if (found := of_expert.shape_in(shape, count := self.config.moe.num_experts)) is None:
            raise InputError(
                f"{self.folder}: {stored} has shape {shape}; {count} experts of {of_expert.parts} layers each, as "
                "config.json says, are (experts, rows, inputs). Get the folder again"
            )
        return found

    def dtype(self, name: str) -> str:
        """Stored dtype of the tensor `name` as safetensors spells it ("F32", "BF16", "I8" …)."""
        reader, stored, _ = self._locate(name)
        return reader.get_slice(stored).get_dtype()

    def _experts_in(self, stored: str, num_experts: int) -> dict[str, Slice]:
        """See `experts_in`."""
        return experts_in(stored, num_experts)

    def _name_in_model(self, stored: str) -> str:
        return model_name(self.config, self._of_decoder(stored))

    def _names_in_folder(self, name: str) -> tuple[str, ...]:
        """What the tensor `name` of the model may be called: as it is published, or as transformers 5 has it."""
        return stored_name(self.config, name), name

    def _of_decoder(self, stored: str) -> str:
        within = self._within
        if within is None:
            return stored
        if stored.startswith(within.head):
            return "lm_head." + stored.removeprefix(within.head)
        return "model." + stored.removeprefix(within.decoder)

    def _read_quantization(self) -> dict[str, Any] | None:
        values = self.config_json.get("quantization_config")
        if values is not None and not isinstance(values, dict):
            path = self.folder / "config.json"
            raise InputError(f"{path}: quantization_config must be an object (got {values!r}); get the folder again")
        return values

    def _locate(self, name: str) -> tuple[Any, str, Slice | None]:
        """The open file that holds the tensor `name`, the stored tensor that it is, and which part of that."""
        names = self._names_in_folder(name)
        if self._within is not None:
            names = tuple(self._within.stored(f"decoder.{each}") for each in names)
        for each in names:
            of_expert = self._slices.get(each)
            stored = each if of_expert is None else of_expert.stored
            if stored in self._file_of:
                return self._reader(self._file_of[stored]), stored, of_expert
        raise InputError(f"{self.folder} holds no tensor {names[0]!r}; it is not complete, or of another architecture")

    def _locate_tensors(self) -> dict[str, str]:
        if (self.folder / INDEX).exists() and not (self.folder / WEIGHTS).exists():
            return self._read_index(self.folder / INDEX)
        return dict.fromkeys(self._reader(WEIGHTS).keys(), WEIGHTS)

    def _read_index(self, path: Path) -> dict[str, str]:
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{path} has no weight_map of tensor names to file names; get or make it again")
        for file_name in sorted(set(weight_map.values())):
            check_inside(path, file_name)
            stored = set(self._reader(file_name).keys())
            if lost := [name for name, where in weight_map.items() if where == file_name and name not in stored]:
                raise InputError(f"{self.folder / file_name} lacks {lost[0]!r}, which {path.name} places there")
        return weight_map

    def _reader(self, file_name: str) -> Any:
        if file_name not in self._readers:
            path = self.folder / file_name
            try:
                self._readers[file_name] = safe_open(path, framework="pt").__enter__()
            except FileNotFoundError:
                raise InputError(f"{path} does not exist; the folder is not complete: get or make it again") from None
            except (SafetensorError, OSError, ValueError) as error:
                raise InputError(f"{path} is not a complete safetensors file ({error}); get it again") from error
        return self._readers[file_name]


def _check_family(folder: Path) -> None:
    """Refuse a network of another family as what it is; what is of none at all is told by what it lacks."""
    family: FamilyName = "decoder"
    with suppress(InputError):
        family = family_of(folder)
    if family in FAMILIES and family not in ("decoder", "vision_language"):
        raise InputError(f"{folder} holds {FAMILIES[family]}, as its config.json says, and a decoder is needed")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint, an artifact or a plain Hugging Face folder.

    Raises:
        InputError: missing, damaged, of another architecture, or without safetensors weights.
    """
    return Checkpoint(folder)


def save_checkpoint(
    folder: Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tokenizer_from: Path | None = None,
    dtype: str = "float32",
    extra_config: dict[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write `config.json`, the weights and the tokenizer files; `write_manifest` comes last and is the caller's.

    Args:
        folder: existing folder, not yet published (see `publish_folder`).
        tensors: (name, tensor) pairs, consumed one at a time.
        tokenizer_from: folder whose tokenizer files are copied, if any.
        dtype: written in `config.json`: the dtype of the unquantized weights.
        extra_config: further keys of `config.json`, such as `quantization_config`.

    Returns:
        Bytes of all tensors.
    """
    values = decoder_config_to_hf(config, dtype) | (extra_config or {})
    named = ((stored_name(config, name), tensor) for name, tensor in tensors)
    return save_folder(folder, values, named, tokenizer_from=tokenizer_from, max_shard_bytes=max_shard_bytes)


def save_folder(
    folder: Path,
    values: dict[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tokenizer_from: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """`save_checkpoint` of a `config.json` and names that are final."""
    atomic_write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)
    with SafetensorsWriter(folder, max_shard_bytes) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
    return writer.total_bytes


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer, chat template and generation settings from one folder to another."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _with_generation_stops(config: DecoderConfig, folder: Path) -> DecoderConfig:
    """Add the end-of-text ids of generation_config.json: instruction-tuned models often list more there."""
    path = folder / "generation_config.json"
    if not path.exists():
        return config
    stops = token_ids(read_json_object(path).get("eos_token_id"))
    if not all(isinstance(stop, int) for stop in stops):
        raise InputError(f"{path}: eos_token_id must be a token id or a list of ids (got {list(stops)!r})")
    merged = tuple(dict.fromkeys(config.eos_token_ids + stops))
    return config.model_copy(update={"eos_token_ids": merged})
