"""A decoder in floating point as transformers and vLLM read it: names, norms and factors are those of its family again.

What `penjing import` made of a Llama, a Qwen or the like is such a folder as it lies; of a Gemma, an OLMo and others it
is one that penjing alone reads, until this writes it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from penjing.compress.export import compressed_tensors, gate
from penjing.compress.export.record import RECORD_FILE, ExportRecord, Form, source_of, write_record
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.errors import InputError
from penjing.core.family import sees
from penjing.core.files import publish_folder
from penjing.core.manifest import verify
from penjing.core.progress import Progress
from penjing.core.published.save import save_published

FLOATING: Form = "transformers"
BLIND = "the decoder alone, which reads text: what it sees with stays where it is, and penjing serves both"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def export_floating(folder: Path, out: Path, force: bool, progress: Progress) -> ExportRecord:
    """Write the checkpoint in `folder` to the folder `out`, after transformers, where it is installed, read it alike.

    Raises:
        InputError: damaged, in integers, an architecture that only penjing reads, beyond the bound, or `out` exists.
        SetupError: disk full, no permission.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantization is not None:
        raise InputError(f"{folder} holds integers, and transformers is for floats: export --to compressed-tensors")
    if checkpoint.manifest is None:
        raise InputError(f"{folder} is a folder of Hugging Face's as it lies, which transformers and vLLM read")
    verify(folder)
    with publish_folder(out, replace=force, marker=RECORD_FILE) as partial:
        save_published(
            partial,
            checkpoint.config,
            _tensors(checkpoint, progress),
            tokenizer_from=folder,
            dtype=_dtype(checkpoint),
        )
        record = ExportRecord(form=FLOATING, **source_of(folder), notes=(BLIND,) if sees(folder) else ())
        record = _measured(record, checkpoint, partial, progress)
        write_record(partial / RECORD_FILE, record)
    return record


def _measured(record: ExportRecord, checkpoint: Checkpoint, partial: Path, progress: Progress) -> ExportRecord:
    loader = compressed_tensors.LOADER
    if not compressed_tensors.can_read():
        return record.model_copy(update={"unmeasured": {loader: "it is not installed: pip install transformers"}})
    progress.start("parity", 1)
    readings = compressed_tensors.read_sequences(partial, gate.prompt_ids(checkpoint))
    difference = gate.measure_weights(checkpoint, loader, readings)
    progress.advance()
    return record.model_copy(update={"differences": (difference,), "bound": gate.WEIGHTS_BOUND.of(loader)})


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most weights: that of the first matrix of a layer, since what import folded is in float32."""
    matrix = next(name for name in checkpoint.tensor_names if name.endswith("_proj.weight"))
    return _DTYPES.get(checkpoint.dtype(matrix), torch.float32)


def _tensors(checkpoint: Checkpoint, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    progress.start("writing", len(checkpoint.tensor_names))
    for name in checkpoint.tensor_names:
        yield name, checkpoint.get(name)
        progress.advance()
