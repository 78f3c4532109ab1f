"""The weights of a decoder's quantized artifact, made layer by layer with one in memory, each kept when it is done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from penjing.compress.decoder.check import check_finite, linear_modules, transformed
from penjing.compress.decoder.head import (
    compress_embedding,
    compress_head,
    compress_positions,
    copy_token_inputs,
    embed_for_calibration,
    unties,
)
from penjing.compress.decoder.layer import FEW_ROWS, Activations, Rotations, compress_layer
from penjing.compress.decoder.rotate import rotation_signs
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.stream import Beside, LayerStream
from penjing.core.artifact.decoder import quantization_config
from penjing.core.artifact.transform import HEAD as HEAD_ROTATION
from penjing.core.artifact.transform import RESIDUAL, write_transforms
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress
from penjing.core.work import StepRecord, Tasks


def make_weights(
    source: Path,
    settings: Int8Settings,
    windows_WT: Tensor,
    tasks: Tasks,
    progress: Progress,
    rows_RE: Tensor | None = None,
) -> tuple[Path, list[StepRecord]]:
    """Transform and quantize the decoder in `source` without measuring anything.

    Args:
        windows_WT: calibration text, (windows, tokens) int64.
        tasks: what is kept of this very work; a killed run goes on after its last complete layer.
        rows_RE: see `embed_for_calibration`.

    Returns:
        A folder inside that of `tasks`, and the record of each layer. It is an artifact without its records; a
        floating checkpoint where the settings keep every layer.

    Raises:
        InputError: a weight or an activation is NaN or infinite.
    """
    return tasks.path / "artifact", _Layers(source, settings, windows_WT, tasks, progress, rows_RE).make()


# Under every name that a type gives them; compressed-tensors quantizes each linear layer that is not named.
_ROUTERS = ("re:.*[.]gate$", "re:.*[.]shared_expert_gate$")


class _Layers:
    """The tasks of one artifact, in order."""

    def __init__(
        self,
        source: Path,
        settings: Int8Settings,
        windows_WT: Tensor,
        tasks: Tasks,
        progress: Progress,
        rows_RE: Tensor | None,
    ) -> None:
        self.source, self.settings, self.windows_WT, self.tasks = source, settings, windows_WT, tasks
        self.progress, self.rows_RE = progress, rows_RE
        self.stream = LayerStream(open_checkpoint(source))
        self.config = self.stream.config
        self.rotations = Rotations.of(settings, self.config.hidden_size, self.config.head_dim)
        self._hidden_WTE: Tensor | None = None  # of the calibration text, after the last layer that was done here

    def make(self) -> list[StepRecord]:
        """Fill the folder `artifact`."""
        num_layers, records = self.config.num_hidden_layers, []
        self._say_unsmoothed()
        self.tasks.run("check", self._check)
        self.progress.start("compressing layers", num_layers)
        for layer in range(num_layers):
            name = _layer_name(layer)
            records.append(self.tasks.run(name, lambda layer=layer: self._layer(layer)))
            if layer:
                self.tasks.discard(_hidden_name(layer - 1))
            self.progress.advance()
        self._say_few(records)
        records += [self.tasks.run(name, step) for name, step in (("head", self._head), ("assemble", self._assemble))]
        return records

    def _say_unsmoothed(self) -> None:
        alpha = self.settings.transform.smooth_down
        moe = self.config.moe
        clamped = moe is not None and moe.activation == "clamped_swiglu"
        absorbs = self.config.mlp_gated or self.config.inner_norms
        if alpha > 0 and (clamped or not absorbs):
            what = "the experts have an activation of their own" if clamped else "the MLPs have no gate"
            self.progress.note(
                f"transform.smooth_down={alpha:g} does nothing here: {what} in {self.source}, so that nothing before "
                "down_proj can absorb a scale; with 0 it is not said"
            )

    def _say_few(self, records: list[StepRecord]) -> None:
        moe = self.config.moe
        few = sum(len(record.result.get("few", ())) for record in records)
        if moe is not None and few:
            layers = sum(self.config.is_moe(layer) for layer in range(self.config.num_hidden_layers))
            self.progress.note(
                f"{few} of {layers * moe.num_experts} experts saw fewer than {FEW_ROWS} tokens and were calibrated on "
                "all; give [data] more tokens if the perplexity rises"
            )

    def _check(self) -> dict[str, Any]:
        check_finite(self.stream.checkpoint, self.progress)
        return {}

    def _layer(self, layer: int) -> dict[str, Any]:
        hidden_WTE = self._hidden_after(layer - 1)
        beside = self._beside_of(layer)
        compressed = compress_layer(self.stream, layer, self.settings, self.rotations, hidden_WTE, beside)
        self.tasks.save(_layer_name(layer), compressed.tensors)
        self.tasks.save(_changes_name(layer), compressed.changes)
        if layer in beside.kept:
            self.tasks.save(_kept_name(layer), dict(zip(_KEPT, beside.kept[layer], strict=True)))
        self.tasks.save(_hidden_name(layer), {"hidden": hidden_WTE})
        self._hidden_WTE = hidden_WTE
        errors = {name: error.as_dict() for name, error in compressed.errors.items()}
        return {"errors": errors, "few": {str(expert): rows for expert, rows in compressed.few.items()}}

    def _beside_of(self, layer: int) -> Beside:
        """What `layer` reads beside hidden states."""
        kept, lender = dict[int, tuple[Tensor, Tensor]](), self.config.keys_of(layer)
        if lender != layer:
            stored = self.tasks.load(_kept_name(lender))
            kept[lender] = stored[_KEPT[0]], stored[_KEPT[1]]
        return Beside(self.windows_WT, kept)

    def _hidden_after(self, layer: int) -> Tensor:
        if self._hidden_WTE is not None:
            return self._hidden_WTE
        if layer >= 0:
            return self.tasks.load(_hidden_name(layer))["hidden"]
        return embed_for_calibration(self.stream, self.rotations, self.windows_WT, self.rows_RE)

    def _head(self) -> dict[str, Any]:
        self.progress.start("compressing the head", 1)
        hidden_WTE = self._hidden_after(self.config.num_hidden_layers - 1)
        sample_ME = Activations(num_windows=hidden_WTE.shape[0]).rows_of(hidden_WTE)
        compressed = compress_head(self.stream, self.settings, self.rotations, sample_ME)
        self.tasks.save("head", compressed.tensors)
        self._hidden_WTE = None
        return {"errors": {} if compressed.error is None else {"lm_head": compressed.error.as_dict()}}

    def _assemble(self) -> dict[str, Any]:
        self.progress.start("writing the artifact", self.config.num_hidden_layers + 2)
        folder = self.tasks.path / "artifact"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        linears = linear_modules(self.config)
        keep = [name for name in linears if self.settings.keeps(name)]
        kv_scales = self.settings.kv_cache == "int8"
        ignored = keep + (list(_ROUTERS) if self.config.moe is not None else [])
        group = self.settings.group if self.settings.weights_bits == 4 else 0
        eight = [name for name in linears if name not in keep and self.settings.bits(name) == 8]
        scheme = quantization_config(
            ignored,
            kv_scales=kv_scales,
            group=group,
            eight=eight,
            offsets=bool(self.settings.offsets),
            whole=self.settings.scales == "whole",
            embedding=self.settings.embedding_dtype == "int8",
            above=[name for name in linears if name not in keep and self.settings.above(name)],
            activation_bits=self.settings.activations_bits,
        )
        quantized = {} if keep == linears else {"quantization_config": scheme}
        tied = self.config.tie_word_embeddings and not unties(self.settings)
        total = save_checkpoint(
            folder,
            transformed(self.config, self.settings.transform).model_copy(update={"tie_word_embeddings": tied}),
            self._tensors(),
            tokenizer_from=self.source,
            extra_config=quantized,
        )
        write_transforms(folder, self._transforms())
        write_manifest(folder, "artifact" if quantized else "checkpoint", {"command": "penjing compress"})
        return {"bytes": total}

    def _transforms(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.rotations is not None:
            found = {RESIDUAL: rotation_signs(self.rotations.residual_EE)}
            if self.config.rotates_values:
                found[HEAD_ROTATION] = rotation_signs(self.rotations.head_DD)
        for layer in range(self.config.num_hidden_layers):
            changes = self.tasks.load(_changes_name(layer))
            found |= {f"model.layers.{layer}.{name}": vector for name, vector in changes.items()}
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for tables in (compress_embedding, compress_positions, copy_token_inputs):
            yield from tables(self.stream, self.settings, self.rotations).items()
        self.progress.advance()
        for layer in range(self.config.num_hidden_layers):
            for name, tensor in self.tasks.load(_layer_name(layer)).items():
                yield f"model.layers.{layer}.{name}", tensor
            self.progress.advance()
        yield from self.tasks.load("head").items()
        self.progress.advance()


def _layer_name(layer: int) -> str:
    return f"layer_{layer:03d}"


def _changes_name(layer: int) -> str:
    return f"changes_{layer:03d}"


_KEPT = ("keys", "values")


def _kept_name(layer: int) -> str:
    return f"kept_{layer:03d}"


def _hidden_name(layer: int) -> str:
    return f"hidden_{layer:03d}"
