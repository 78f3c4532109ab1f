"""A teacher's likeliest tokens on disk, so that it answers once for all epochs and runs.

For every token of the training shards: the `top_k` classes of the softened distribution, their log-probabilities, and
the log of what all others have together, which the divergence takes as one more class (`top_divergence_sum`). The
temperature is part of the cache, since the others' part at one temperature does not follow from that at another. A
token costs 8 × top_k + 4 bytes: with 32 classes a million tokens are 260 MB.

A cache is a folder named by the hash of what it depends on (teacher and its precision, shards, length, mask, top_k,
temperature), stated in its `index.json`, with parts of `SAMPLES` sequences as safetensors. Parts appear when they are
complete: a pass that was killed goes on after the last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from penjing.core.errors import InputError, SetupError
from penjing.core.files import atomic_write_bytes, atomic_write_text, holding, sha256_file, writing
from penjing.core.progress import Progress
from penjing.train.data.shards import INDEX_NAME, TokenShards
from penjing.train.data.stream import Draw
from penjing.train.data.tokens import TokenRows
from penjing.train.objective.objective import Batch

SAMPLES = 64  # of a part
_TOGETHER = 4  # sequences in one pass of the teacher
Answer = Callable[[Batch], Tensor]  # a batch of tokens (B, T) → logits (B·T, V)


@dataclass(frozen=True)
class TeacherCache:
    """What a cache depends on; `fill` makes it, `read` reads it.

    Attributes:
        base: where caches lie.
        teacher: hashes of the teacher's files.
        shards: the folder of token shards; their "train" split is cached.
        mode: the precision in which the teacher answers.
    """

    base: Path
    teacher: dict[str, str]
    shards: Path
    sequence_length: int
    document_mask: bool
    top_k: int
    temperature: float
    mode: str
    _open: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Content of `index.json`."""
        return {
            "schema_version": 1,
            "kind": "teacher logits",
            "teacher": self.teacher,
            "shards": sha256_file(self.shards / INDEX_NAME),
            "sequence_length": self.sequence_length,
            "document_mask": self.document_mask,
            "top_k": self.top_k,
            "temperature": self.temperature,
            "precision": self.mode,
            "samples_per_part": SAMPLES,
        }

    @property
    def folder(self) -> Path:
        """The cache's own folder."""
        return self.base / hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]

    def fill(self, load: Callable[[], Answer], progress: Progress) -> None:
        """Write the parts that are missing; `load` is called for a teacher when there are any.

        Raises:
            InputError: the teacher's logits hold NaN or infinity.
            SetupError: not enough disk space, no permission.
        """
        folder = self.folder
        sequences = TokenRows(TokenShards(self.shards, "train"), self.sequence_length, self.document_mask)
        count = len(sequences)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with holding(folder.with_suffix(".lock")):
            missing = [part for part in range(-(-count // SAMPLES)) if not self._path(folder, part).exists()]
            if not missing:
                return
            self._check_space(folder, len(missing))
            atomic_write_text(folder / "index.json", json.dumps(self.facts, indent=2) + "\n")
            answer = load()
            progress.start("caching the teacher's logits", len(missing))
            for part in missing:
                samples = np.arange(part * SAMPLES, min((part + 1) * SAMPLES, count))
                rows = [
                    self._likeliest(answer, sequences.read(some))
                    for some in np.array_split(samples, -(-len(samples) // _TOGETHER))
                ]
                tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
                atomic_write_bytes(self._path(folder, part), save(tensors))
                progress.advance()

    def read(self, samples: np.ndarray[Any, Any]) -> Batch:
        """The entries "teacher_index" (B, T, K) int32, "teacher_top" (B, T, K) and "teacher_rest" (B, T) float32.

        Raises:
            InputError: a part is missing or damaged.
        """
        rows = [self._row(int(sample)) for sample in samples]
        return {f"teacher_{name}": torch.stack([row[name] for row in rows]) for name in ("index", "top", "rest")}

    def _row(self, sample: int) -> dict[str, Tensor]:
        part, row = divmod(sample, SAMPLES)
        path = self._path(self.folder, part)
        try:
            if part not in self._open:
                self._open[part] = safe_open(path, framework="pt").__enter__()
            found = {name: self._open[part].get_slice(name)[row] for name in ("index", "top", "rest")}
            for name, tensor in found.items():
                shape = (self.sequence_length,) if name == "rest" else (self.sequence_length, self.top_k)
                dtype = torch.int32 if name == "index" else torch.float32
                if tensor.shape != shape or tensor.dtype != dtype:
                    raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}")
            return found
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); delete it, and the teacher answers anew") from error

    def _likeliest(self, answer: Answer, batch: Batch) -> dict[str, Tensor]:
        logits = answer(batch)
        shape = batch["tokens"].shape
        found: dict[str, list[Tensor]] = {"index": [], "top": [], "rest": []}
        for rows in logits.split(64):  # a few MiB of float32
            wide = rows.to(torch.float32) / self.temperature
            normaliser = wide.logsumexp(-1)
            if not bool(normaliser.isfinite().all()):
                raise InputError(
                    "the teacher's logits hold NaN or infinity; its weights or the data are damaged: check both"
                )
            top, index = wide.topk(self.top_k, -1)
            found["top"].append(top - normaliser[:, None])
            found["index"].append(index.to(torch.int32))
            found["rest"].append(wide.scatter_(1, index, -torch.inf).logsumexp(-1) - normaliser)
        return {name: torch.cat(parts).unflatten(0, shape).cpu().contiguous() for name, parts in found.items()}

    def _check_space(self, folder: Path, parts: int) -> None:
        needed = parts * SAMPLES * self.sequence_length * (8 * self.top_k + 4)
        free = shutil.disk_usage(folder).free
        if needed > 0.9 * free:
            raise SetupError(
                f"the teacher's cache in {folder} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; lower "
                "cache_top_k, give fewer sources, or leave the cache out"
            )

    @staticmethod
    def _path(folder: Path, part: int) -> Path:
        return folder / f"part-{part:06d}.safetensors"


@dataclass(frozen=True)
class Cached:
    """The sequences of `rows`, with what the teacher said of them."""

    rows: TokenRows
    cache: TeacherCache

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        return self.rows.batch(draw) | self.cache.read(draw.samples)
