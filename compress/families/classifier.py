"""What compression does with image classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from penjing.compress.distill.classifier import TRAINING
from penjing.compress.export.classifier import export_classifier
from penjing.compress.families.base import Exporter, Family, Pruner, Quantizer, refuse_artifact
from penjing.compress.graph.own import classifier_network
from penjing.compress.measure.cost import classifier_calls
from penjing.compress.measure.evaluate import evaluate_classifier, images_judged
from penjing.compress.measure.skeleton import skeleton_of_classifier
from penjing.compress.parity.classifier import ClassifierParity
from penjing.compress.prune.batch_norm import reestimate_batch_norms
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.quantizers import classifier as quantizer
from penjing.compress.samples.data import DataSettings, image_samples
from penjing.core.checkpoint.classifier import classifier_config, classifier_skeleton, load_classifier, save_classifier
from penjing.core.family import FAMILIES
from penjing.core.graph.network import Network
from penjing.core.manifest import read_manifest, verify
from penjing.core.models.resnet import ResNet
from penjing.core.progress import Progress


def _hashes(folder: Path) -> dict[str, str]:
    refuse_artifact(folder)
    hashes = verify(folder).sha256
    classifier_skeleton(folder)
    return hashes


def _open(folder: Path, _: Sequence[str], __: Sequence[int], ___: Progress) -> ResNetSubject:
    return ResNetSubject(folder)


def _as_graph(folder: Path, model: nn.Module) -> Network:
    assert isinstance(model, ResNet)
    return classifier_network(model, classifier_config(folder).image_size)


def refresh_batch_norms(folder: Path, data: DataSettings, progress: Progress) -> dict[str, Any]:
    """Estimate the batch norms' statistics of the classifier in `folder`, not yet published, from training images.

    Returns:
        How many batch norms it has, as "batch_norms".
    """
    model, config = load_classifier(folder)
    progress.start("statistics of batch norms", 1)
    count = reestimate_batch_norms(model, image_samples(folder, data, progress).inputs())
    save_classifier(folder, config, model, read_manifest(folder).created_by)
    progress.advance()
    return {"batch_norms": count}


FAMILY = Family(
    name="classifier",
    said=FAMILIES["classifier"],
    hashes=_hashes,
    skeleton=skeleton_of_classifier,
    samples=image_samples,
    quality="accuracy",
    evaluate=evaluate_classifier,
    held_out=images_judged,
    calls=classifier_calls,
    pruner=Pruner(parts=(), open=_open, finish=refresh_batch_norms),
    training=TRAINING,
    quantizer=Quantizer(quantizer.ClassifierQuantize, quantizer.check, quantizer.quantize),
    rerun=ClassifierParity.rerun,
    exporter=Exporter(("onnx", "tensorrt"), (), export_classifier),
    as_graph=_as_graph,
)
