"""Pruning from checkpoint to checkpoint: its time and memory, the same network pruned by Torch-Pruning, and how much
faster the result runs, in torch and in ONNX Runtime, beside how many multiplications it saves.

python benchmarks/run_prune.py             # ResNet-50 (224×224) and a decoder of 135M; rows in results/prune.jsonl
python benchmarks/run_prune.py --tiny      # the same on small networks, in a minute; nothing is written
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lib.costs import measure
from lib.rows import Row, append, new_row, show
from torch import nn

from penjing.compress.families.base import family_at
from penjing.compress.measure.cost import MeasureSettings, weight_bytes
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.importance import Kind, magnitude
from penjing.compress.prune.ranking import select
from penjing.compress.prune.surgery import remove
from penjing.compress.samples.data import TokenData
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.cli import guarded
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest
from penjing.core.memory import PeakMemory, release_unused
from penjing.core.models.config import DecoderConfig
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig, cifar_resnet, imagenet_resnet
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Silent

RATIO = 0.3
QUARTER = 0.25  # of whole widths a whole number: Torch-Pruning rounds what stays down, we round it up
TINY_RESNET = cifar_resnet(8, 10, width=16)
TINY_DECODER = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
DECODER_135M = DecoderConfig(  # SmolLM2-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def write_resnet(folder: Path, config: ResNetConfig, size: int) -> Path:
    """Random weights, for images of `size` × `size`."""
    torch.manual_seed(0)
    labels = tuple(map(str, range(config.num_classes)))
    channels = config.in_channels
    vision = ClassifierConfig(
        model=config, image_size=(size, size), mean=(0.5,) * channels, std=(0.5,) * channels, labels=labels
    )
    with publish_folder(folder) as partial:
        save_classifier(partial, vision, ResNet(config), {})
    return folder


def write_decoder(folder: Path, config: DecoderConfig) -> Path:
    """Random weights; one tensor in memory at a time."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, shape in tensor_shapes(config).items():
            yield name, torch.randn(shape, generator=generator) * 0.02

    with publish_folder(folder) as partial:
        save_checkpoint(partial, config, tensors())
        write_manifest(partial, "checkpoint", {})
    return folder


def prune(source: Path, into: Path, round_to: int = 8, method: Kind = "l1") -> dict[str, Any]:
    """The record of a step; `method`: "l1", or "taylor" for a decoder, over two windows of 512 tokens."""
    tokens = torch.randint(TINY_DECODER.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))
    step = Prune(ratio=RATIO, round_to=round_to, method=method)
    with publish_folder(into) as partial:
        pruner = family_at(source).need("pruner", "pruned")
        return prune_checkpoint(source, partial, step, pruner, TokenData(tokens, batch=1), Silent())


def in_child(source: Path, scratch: Path, method: Kind) -> dict[str, float]:
    """Seconds of the step, and its peak memory over that of a process that has pruned a tiny network."""
    command = [sys.executable, __file__, "--child", str(source), str(scratch), method]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout) | {"process_s": time.perf_counter() - began}


def child(source: Path, scratch: Path, method: Kind) -> None:
    """What `in_child` starts: print seconds and bytes as JSON."""
    is_decoder = "resnet" not in source.name
    first = scratch / "first"
    if is_decoder:
        write_decoder(first, TINY_DECODER)
    else:
        write_resnet(first, TINY_RESNET, 16)
    prune(first, scratch / "first-pruned")
    release_unused()
    before = PeakMemory.resident_bytes()
    with PeakMemory() as memory:
        record = prune(source, scratch / f"{source.name}-pruned", method=method)
    print(json.dumps({"seconds": record["seconds"], "peak_bytes": memory.peak_bytes - before}))


def against_torch_pruning(name: str, source: Path, runs: int) -> list[Row]:
    """Analysis, L1 and removal of the same network by both, in turns; and the share of layers of one shape."""
    try:
        import torch_pruning
    except ImportError:
        return [new_row("prune", f"{name}_analysis", None, "s", runs=0, reason="Torch-Pruning is not installed")]
    dense, config = load_classifier(source)
    example = torch.randn(2, config.model.in_channels, *config.image_size)

    def ours() -> nn.Module:
        model = copy.deepcopy(dense)
        groups = dependency_graph(model, (example,)).groups
        remove(model, select(groups, magnitude(model, groups), QUARTER, round_to=1))
        return model

    def theirs() -> nn.Module:
        model = copy.deepcopy(dense)
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=1)
        settings: dict[str, Any] = {"pruning_ratio": QUARTER, "ignored_layers": [model.fc]}
        torch_pruning.pruner.MetaPruner(model, example, importance=importance, **settings).step()
        return model

    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    made: dict[str, nn.Module] = {}
    for _ in range(runs):
        for who, function in (("ours", ours), ("theirs", theirs)):
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[who] = function()
            seconds[who].append(time.perf_counter() - began)
    one, other = made["ours"].state_dict(), made["theirs"].state_dict()
    weights = [key for key, value in one.items() if value.dim() > 1]
    agreeing = sum(one[key].shape == other[key].shape for key in weights) / len(weights)
    peer = f"Torch-Pruning {torch_pruning.__version__}"
    middle = {who: sorted(times)[len(times) // 2] for who, times in seconds.items()}
    return [
        new_row(
            "prune",
            f"{name}_analyse_and_remove",
            middle["ours"],
            "s",
            runs=runs,
            baseline=peer,
            baseline_value=middle["theirs"],
        ),
        new_row("prune", f"{name}_layers_of_one_shape", 100 * agreeing, "%", runs=1, baseline=peer),
    ]


def throughput(name: str, source: Path, scratch: Path, settings: MeasureSettings) -> list[Row]:
    """Multiplications that are left, and images a second, each over the dense network; widths rounded or not."""
    rows = []
    for round_to in (8, 1):
        pruned = scratch / f"{name}-round-{round_to}"
        record = prune(source, pruned, round_to)
        label, baseline = f"{name}_round_to_{round_to}", "the dense network"
        macs = record["macs"]
        against = {"baseline": baseline, "baseline_value": macs["before"]}
        rows.append(new_row("prune", f"{label}_macs", macs["after"], "MACs", runs=1, **against))
        dense, ours = measure([source, pruned], settings)
        for before, after in zip(dense["latency"], ours["latency"], strict=True):
            metric = f"{label}_{after['runtime']}_{after['case'].replace(' ', '_')}"
            against = {"baseline": baseline, "baseline_value": after["throughput"] / after["speedup"]}
            unit, runs = f"{before['unit']}/s", after["runs"]
            rows.append(new_row("prune", metric, after["throughput"], unit, runs=runs, **against))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small networks; the rows are shown and not written")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7, help="of timing dense and pruned networks in turns")
    arguments = parser.parse_args()
    if arguments.child:
        source, scratch, method = arguments.child
        child(Path(source), Path(scratch), method)
        return 0
    tiny, rows = arguments.tiny, []
    seconds, batches = (0.05, (1, 4)) if tiny else (1.0, (1, 16))
    settings = MeasureSettings(rounds=arguments.rounds, seconds=seconds, batches=batches)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        resnet = write_resnet(scratch / "resnet", TINY_RESNET if tiny else imagenet_resnet(50), 16 if tiny else 224)
        decoder = write_decoder(scratch / "decoder", TINY_DECODER if tiny else DECODER_135M)
        name, decoder_name = ("resnet8", "decoder_tiny") if tiny else ("resnet50", "decoder_135m")
        steps: list[tuple[str, Path, Kind]] = [
            (name, resnet, "l1"),
            (decoder_name, decoder, "l1"),
            (f"{decoder_name}_taylor", decoder, "taylor"),
        ]
        for metric, source, method in steps:
            (scratch / f"{metric}-child").mkdir()
            found = in_child(source, scratch / f"{metric}-child", method)
            size = weight_bytes(source)
            rows += [
                new_row("prune", f"{metric}_step", found["seconds"], "s", runs=1),
                new_row("prune", f"{metric}_process", found["process_s"], "s", runs=1),
                new_row(
                    "prune",
                    f"{metric}_peak_memory",
                    found["peak_bytes"] / 1e6,
                    "MB",
                    runs=1,
                    baseline="the checkpoint's weights",
                    baseline_value=size / 1e6,
                ),
            ]
        rows += against_torch_pruning(name, resnet, runs=3)
        rows += throughput(name, resnet, scratch, settings)
    if tiny:
        show(rows)
    else:
        append("prune", rows)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
