"""What compression does with decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.compress.decoder.check import check_model, checkpoint_hashes
from penjing.compress.decoder.parity import rerun
from penjing.compress.distill.decoder import TRAINING
from penjing.compress.export.decoder import FOLDERS, export_decoder
from penjing.compress.families.base import Asker, DepthChoice, Exporter, Family, Needs, Pruner, Quantizer
from penjing.compress.measure.answers import answered, questions_for, scores
from penjing.compress.measure.cost import decoder_calls
from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_decoder
from penjing.compress.measure.skeleton import skeleton_of_decoder
from penjing.compress.prune.graph import Group
from penjing.compress.prune.importance import Scores
from penjing.compress.prune.subject import Subject
from penjing.compress.prune_decoder.depth import block_influence, least
from penjing.compress.prune_decoder.obs import obs_scores
from penjing.compress.prune_decoder.reconstruct import reconstruct
from penjing.compress.prune_decoder.subject import DecoderSubject
from penjing.compress.prune_decoder.trials import layers_by_trial
from penjing.compress.prune_decoder.weights import WeightMethod, zero_weights
from penjing.compress.quantizers import decoder as quantizer
from penjing.compress.samples.data import DataSettings, Samples, token_samples
from penjing.compress.sight.parity import measure_sight
from penjing.core.artifact.parity import Difference
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES
from penjing.core.progress import Progress


def _rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    return *rerun(folder, progress), *measure_sight(folder)


def _hashes(folder: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(folder)
    check_model(checkpoint)
    return checkpoint_hashes(checkpoint)


def _held_out(settings: EvaluateSettings) -> int:
    return settings.prose_tokens + settings.code_tokens + len(settings.own) * settings.own_tokens  # at most


def _num_layers(folder: Path) -> int:
    return open_checkpoint(folder).config.num_hidden_layers


def _depth(
    folder: Path, count: int, choice: DepthChoice, samples: Samples, progress: Progress
) -> tuple[list[int], dict[str, Any]]:
    DecoderSubject(folder, (), (), progress)  # refuses what is damaged before anything runs through it
    if count >= (whole := _num_layers(folder)):
        raise ConfigError(f"layers={count}: {folder} has {whole}, and at least one must stay")
    if choice == "trials":
        layers, rounds = layers_by_trial(folder, _windows(samples), count, progress)
        return layers, {"layer_trials": rounds}
    influence = block_influence(folder, samples.inputs(), progress)
    return least(influence, count), {"block_influence": influence}


def _reconstruct(
    whole: Path,
    cut: Path,
    into: Path,
    dropped: Sequence[int],
    samples: Samples,
    progress: Progress,
    own: bool,
) -> list[dict[str, Any]]:
    return reconstruct(whole, cut, into, dropped, _windows(samples), progress, own=own)


def _obs(subject: Subject, groups: Sequence[Group], samples: Samples, progress: Progress) -> Scores:
    return obs_scores(subject.folder, groups, subject.dropped, _windows(samples), progress)


def _zero_weights(
    source: Path,
    into: Path,
    method: WeightMethod,
    share: float,
    pattern: tuple[int, int] | None,
    samples: Samples,
    progress: Progress,
) -> list[dict[str, Any]]:
    DecoderSubject(source, (), (), progress)  # refuses what pruning does not handle
    return zero_weights(source, into, method, share, pattern, _windows(samples), progress)


def _windows(samples: Samples) -> Tensor:
    batches = [tokens_BT for (tokens_BT,) in samples.inputs()]
    if not batches:
        raise InputError("the step looks at calibration text, and there is none; give calibration data")
    return torch.cat(batches)


def _open(folder: Path, parts: Sequence[str], dropped: Sequence[int], progress: Progress) -> DecoderSubject:
    return DecoderSubject(folder, parts, dropped, progress)


def _needs(source: Path, step: Any, data: DataSettings) -> Needs:
    return Needs(*quantizer.needed(source, step, data))


FAMILY = Family(
    name="decoder",
    said=FAMILIES["decoder"],
    hashes=_hashes,
    skeleton=skeleton_of_decoder,
    samples=token_samples,
    quality="perplexity",
    evaluate=evaluate_decoder,
    held_out=_held_out,
    calls=decoder_calls,
    asker=Asker(questions_for, answered, scores),
    pruner=Pruner(
        parts=("ffn", "heads", "hidden", "layers"),
        open=_open,
        depth=_depth,
        reconstruct=_reconstruct,
        obs=_obs,
        zero_weights=_zero_weights,
        num_layers=_num_layers,
    ),
    training=TRAINING,
    quantizer=Quantizer(quantizer.DecoderQuantize, quantizer.check, quantizer.quantize, _needs, quantizer.fitting),
    rerun=_rerun,
    exporter=Exporter((*FOLDERS, "gguf"), FOLDERS, export_decoder),
)
