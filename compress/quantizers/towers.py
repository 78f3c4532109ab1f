"""Two towers become one INT8 artifact: each a graph of its own, calibrated by pairs, gated by its own parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.graph.own import tower_networks
from penjing.compress.quantize.targets import resolve
from penjing.compress.quantizers.graph import GateSettings, least_floating
from penjing.compress.quantizers.onnx import quantization_for, write_records
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.pairs import calibration_pairs
from penjing.core.artifact.parity import Bound, Difference, Parity
from penjing.core.checkpoint.towers import load_towers, save_beside
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer
from penjing.core.work import Places


class TowersQuantize(GateSettings):
    """INT8 for two towers."""


def check(_: Path, step: TowersQuantize, data: DataSettings) -> None:
    """Refuse settings that do not fit.

    Raises:
        ConfigError: the target cannot express them, or there are no pairs.
    """
    resolve(step.target, step)
    if data.source is None:
        raise ConfigError("two towers are calibrated and judged by pairs: name them, as data.source = 'pairs.jsonl'")


def quantize(places: Places, step: TowersQuantize, data: DataSettings, _: Path, progress: Progress) -> dict[str, Any]:
    """Fill `places.partial`, not yet published, with the artifact of the towers in `places.source`.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is damaged, the pairs do not fit, or a tower fails its parity gate.
    """
    partial, source = places.partial, places.source
    towers = load_towers(source)
    samples = calibration_pairs(source, data, progress)
    networks = tower_networks(towers)
    progress.start("calibrating", len(networks))
    said = dict[str, dict[str, Any]]()
    for name, network in networks.items():
        (partial / name).mkdir()
        said[name] = least_floating(partial / name, network, step, samples.towers[name], progress)
        progress.advance()
    save_beside(partial, towers.config, source, TextTokenizer(source, towers.config.text).max_tokens)
    differences = [
        Difference.model_validate(each | {"quantity": f"{name}: {each['quantity']}"})
        for name, one in said.items()
        for each in one["differences"]
    ]
    bound = Bound.model_validate(said["image"]["bound"] | {"quantity": f"image: {said['image']['bound']['quantity']}"})
    parity = Parity(family="towers", inputs={}, outputs={}, differences=tuple(differences), bound=bound)
    write_records(partial, quantization_for(step.target, step), parity)
    first = said["image"]
    return {
        "kind": "quantize",
        "quantized": {
            "target": first["target"],
            "formats": first["formats"],
            "training_steps": 0,
            "layers": [row | {"name": f"{name}.{row['name']}"} for name, one in said.items() for row in one["layers"]],
            "kept_for_parity": [
                f"{name}.{row}" for name, one in said.items() for row in one.get("kept_for_parity", [])
            ],
            "differences": [each.model_dump() for each in differences],
            "bound": bound.model_dump(),
            "unmeasured": first["unmeasured"],
        },
    }
