"""What a smaller SmolLM2 loses on texts that it was neither calibrated nor healed on, and how much faster it answers.

    python benchmarks/run_prune_decoder.py                                   # channels and layers, plain and fitted
    python benchmarks/run_prune_decoder.py --heal --int8                     # … healed, and then in INT8
    python benchmarks/run_prune_decoder.py --variants channels --windows 4 --rounds 0
    python benchmarks/run_prune_decoder.py --texts-of-its-own build/texts    # calibrate on these too
    python benchmarks/run_prune_decoder.py --heal finetune                   # without a teacher; lora: by an adapter;
                                                                             # features: from hidden states as well
    python benchmarks/run_prune_decoder.py --published                       # what papers report, copied from them

A variant is the prune step of a recipe with settings of its own. Rows are VARIANT/STAGE/TEXT_rise in percent, with the
ends of the 95 % interval over the same windows, where the stage is removed, healed (healed-finetune, …) or
int8; VARIANT/STAGE/worst_rise is the largest. VARIANT/decode is the speed of greedy answers in our engine, the
checkpoint taking turns. What is complete in build/prune-decoder is neither made nor judged again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lib.rows import RESULTS, Row, append, new_row
from lib.texts import SOURCES
from run_generalisation import ORIGINAL, qualities, text_windows
from torch import Tensor

from penjing.compress.families.base import family_at
from penjing.compress.measure.evaluate import Quality, compare, quality_from_json
from penjing.compress.recipe import load_recipe
from penjing.compress.run import run_recipe
from penjing.compress.steps.base import Context
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.compress.steps.prune_weights import PruneWeights
from penjing.core.cli import guarded
from penjing.core.config import read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.progress import Progress, progress_bar
from penjing.core.runtime.timing import interleaved
from penjing.core.work import Places
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

ROOT = RESULTS.parents[1]
BENCHMARK = "prune_decoder"
TENTH = 0.17  # of the MLP channels: 1536 → 1280, a tenth of all parameters, as four layers are
VARIANTS = {  # recipe, settings of its prune step
    "channels-plain": ("smollm2-pruned", {"reconstruct": False, "ratio": TENTH}),
    "channels": ("smollm2-pruned", {"reconstruct": True, "ratio": TENTH}),
    "obs-plain": ("smollm2-pruned", {"method": "obs", "ratio": TENTH}),
    "obs": ("smollm2-pruned", {"method": "obs", "reconstruct": True, "ratio": TENTH}),
    "obs-own": ("smollm2-pruned", {"method": "obs", "reconstruct": True, "reconstruct_to": "layer", "ratio": TENTH}),
    "channels-own": ("smollm2-pruned", {"reconstruct": True, "reconstruct_to": "layer", "ratio": TENTH}),
    "obs-global": ("smollm2-pruned", {"method": "obs", "reconstruct": True, "rank": "global", "ratio": TENTH}),
    "layers-plain": ("smollm2-shallow", {"reconstruct": False, "layers_by": "influence"}),
    "layers-fitted": ("smollm2-shallow", {"reconstruct": True, "layers_by": "influence"}),
    "layers": ("smollm2-shallow", {"reconstruct": True, "layers_by": "trials"}),
}
WEIGHTS = {  # settings of the step prune_weights
    f"{method}-{name}": {"method": method, **measure}
    for name, measure in (("2:4", {"pattern": "2:4"}), ("half", {"ratio": 0.5}))
    for method in ("magnitude", "wanda", "sparsegpt")
}
HEALS: dict[str, dict[str, Any]] = {  # of --heal: changes to the recipes' second step, which distills
    "distill": {},
    "finetune": {"kind": "finetune"},
    "lora": {"adapter": {"rank": 16}},
    "features": {"weights": {"logits": 1.0, "hidden": 1.0}},
}
SLEB = "LLaMA-2 7B on C4, perplexity 7.26, not healed (arXiv 2402.09025, table 1)"
MINITRON = "the whole Llama 3.1 8B; its halves were distilled (arXiv 2407.14679)"
PUBLISHED = [  # metric, value, unit, of what, what that has
    ("SLEB, 10 % of the layers/rise", 28.65, "%", SLEB, None),
    ("SLEB, 20 % of the layers/rise", 69.7, "%", SLEB, None),
    ("LLM-Pruner, 20 % of the channels/rise", 68.73, "%", SLEB, None),
    ("SliceGPT, 20 % of the channels/rise", 258.95, "%", SLEB, None),
    ("SparseGPT, 2:4/rise", 86.5, "%", SLEB, None),
    ("Wanda, 2:4/rise", 114.46, "%", SLEB, None),
    ("Minitron, widths/MMLU", 60.5, "points", MINITRON, 65.3),
    ("Minitron, layers/MMLU", 58.7, "points", MINITRON, 65.3),
]
ANY_LOSS = {"perplexity_ratio": 1e12, "retries": 0}
PROMPT_TOKENS, NEW_TOKENS = 128, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join([*VARIANTS, *WEIGHTS])
    )
    parser.add_argument("--texts", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens of each text")
    parser.add_argument("--tokens", type=int, help="of calibration, in place of the recipes'")
    parser.add_argument("--texts-of-its-own", type=Path, help="a folder that 'penjing generate --samples' wrote")
    parser.add_argument("--ratio", type=float, help="of the channels, in place of the recipe's")
    parser.add_argument("--heal", nargs="?", const="distill", choices=HEALS, help="by the recipes' second step")
    parser.add_argument("--published", action="store_true", help="append what papers report, and measure nothing")
    parser.add_argument("--steps", type=int, help="updates of healing, in place of the recipes'")
    parser.add_argument("--peak", type=float, default=3e-4, help="learning rate of healing")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of healing")
    parser.add_argument("--int8", action="store_true", help="as recipes/smollm2-int8.toml does")
    parser.add_argument("--rounds", type=int, default=5, help="of timing; 0 leaves it out")
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "prune-decoder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.published:
        append(BENCHMARK, [published_row(*each) for each in PUBLISHED], arguments.results)
        return 0
    if unknown := sorted(set(arguments.variants) - VARIANTS.keys() - WEIGHTS.keys()):
        raise ConfigError(f"--variants {unknown[0]}: there is none; take {', '.join([*VARIANTS, *WEIGHTS])}")
    rows: list[Row] = []
    windows, versions = text_windows(arguments.model, arguments.texts, arguments.windows, rows)
    with progress_bar() as progress:
        before = judged("fp32", arguments.model, windows, arguments.work, progress)
        rows += [
            new_row(BENCHMARK, f"fp32/{name}", quality.value, "perplexity", runs=1, more_versions=versions)
            for name, quality in before.items()
        ]
        append(BENCHMARK, rows, arguments.results)
        for name in arguments.variants:
            for stage, folder, record in stages(name, arguments, progress):
                after = judged(f"{name}-{stage}", folder, windows, arguments.work, progress)
                rows = rise_rows(f"{name}/{stage}", before, after, versions)
                if record is not None:
                    rows += size_rows(name, record)
                if arguments.rounds and not stage.startswith("healed"):  # healing changes no shape
                    rows.append(decode_row(f"{name}/{stage}", [arguments.model, folder], arguments.rounds))
                append(BENCHMARK, rows, arguments.results)
    return 0


def published_row(metric: str, value: float, unit: str, of: str, whole: float | None) -> Row:
    """A figure of a paper, which was measured by its authors."""
    row = new_row(BENCHMARK, f"published: {metric}", value, unit, runs=1, baseline=of, baseline_value=whole)
    return row.model_copy(update={"device": "as published", "cores": 1, "versions": {}})


def judged(name: str, folder: Path, windows: dict[str, Tensor], work: Path, progress: Progress) -> dict[str, Quality]:
    """`qualities`, kept in `work` by `name` and by what the windows hold."""
    held = hashlib.sha256(b"".join(text.encode() + part.numpy().tobytes() for text, part in windows.items()))
    path = work / f"{name}-{held.hexdigest()[:12]}.json"
    if path.exists():
        return {text: quality_from_json(found) for text, found in json.loads(path.read_text()).items()}
    found = qualities(folder, windows, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps({text: asdict(quality) for text, quality in found.items()}))
    return found


def stages(
    name: str, arguments: argparse.Namespace, progress: Progress
) -> Iterator[tuple[str, Path, dict[str, Any] | None]]:
    """Each stage of a variant that was asked for, its folder, and the record of what was removed if that was now; a
    stage is made once the one before was judged."""
    recipe, settings = VARIANTS[name] if name in VARIANTS else ("smollm2-pruned", WEIGHTS[name])
    source = ROOT / "recipes" / f"{recipe}.toml"
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    removed, record = work / name, None
    if not (removed / MANIFEST_NAME).exists():
        record = remove(source, settings, removed, arguments, progress)
    yield "removed", removed, record
    small = removed
    if arguments.heal:
        values: dict[str, Any] = read_recipe(source, [])
        heal = healing(values["steps"][-1], arguments)
        stage = "healed" if arguments.heal == "distill" else f"healed-{arguments.heal}"
        values |= {"model": str(removed), "output": str(work / f"{name}-{stage}"), "steps": [heal], "guard": ANY_LOSS}
        values |= {"measure": {"rounds": 0}, "evaluate": {"prose_tokens": 512, "code_tokens": 0}}
        small = run_recipe(values, progress=progress)
        yield stage, small, None
    if arguments.int8:
        int8 = work / f"{small.name}-int8"
        calibrated = read_recipe(ROOT / "recipes" / "smollm2-int8.toml", [])
        values = calibrated | {"model": str(small), "output": str(int8), "measure": {"rounds": 0}, "guard": ANY_LOSS}
        values |= {"evaluate": {"prose_tokens": 512, "code_tokens": 0}}
        yield "int8", run_recipe(values, progress=progress), None


def healing(step: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A recipe's `distill` as the command line wants it."""
    heal = step | {"teacher": str(arguments.model), "precision": {"mode": arguments.precision}}
    heal |= {"learning_rate": {"peak": arguments.peak, "warmup": 0.1}}
    heal |= ({"steps": arguments.steps} if arguments.steps else {}) | HEALS[arguments.heal]
    if heal["kind"] == "finetune":
        del heal["teacher"]
    if arguments.texts_of_its_own is not None:
        heal["sources"] = [*heal["sources"], str(arguments.texts_of_its_own)]
    return heal


def remove(
    source: Path, settings: dict[str, Any], out: Path, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | None:
    """Prune by the first step of a recipe with other settings; its record. None where single weights become zero."""
    chosen = [f"model={arguments.model}"]
    if arguments.tokens:
        chosen.append(f"data.tokens={arguments.tokens}")
    if arguments.texts_of_its_own is not None:
        chosen.append(f'data.calibrate=["{arguments.texts_of_its_own}"]')
    loaded = load_recipe(source, chosen)
    if settings in WEIGHTS.values():
        weights = PruneWeights.model_validate(settings)
        with publish_folder(out) as partial:
            places = Places(arguments.model, partial, partial)
            weights.run(places, Context(arguments.model, family_at(arguments.model), loaded.data, progress))
        return None
    step = loaded.steps[0]
    assert isinstance(step, Prune)
    changed = settings | ({"ratio": arguments.ratio} if arguments.ratio and step.ratio else {})
    step = Prune.model_validate(step.model_dump() | changed)
    family = family_at(arguments.model)
    data = family.samples(arguments.model, loaded.data, progress)
    with publish_folder(out) as partial:
        return prune_checkpoint(arguments.model, partial, step, family.need("pruner", "pruned"), data, progress)


def rise_rows(
    metric: str, before: dict[str, Quality], after: dict[str, Quality], versions: dict[str, str]
) -> list[Row]:
    """The rise of each text's perplexity with its interval, and the largest."""
    rises = {text: compare(quality, after[text]) for text, quality in before.items()}
    rises["worst"] = max(rises.values(), key=lambda change: change.value)
    return [
        new_row(BENCHMARK, f"{metric}/{text}_rise{end}", 100 * value, "%", runs=1, more_versions=versions)
        for text, change in rises.items()
        for end, value in (("", change.value), ("_low", change.low), ("_high", change.high))
    ]


def size_rows(name: str, record: dict[str, Any]) -> list[Row]:
    """Parameters beside those of the checkpoint, and how long the removal took."""
    left = record["parameters"]
    return [
        new_row(
            BENCHMARK,
            f"{name}/parameters",
            left["after"],
            "parameters",
            runs=1,
            baseline=ORIGINAL,
            baseline_value=left["before"],
        ),
        new_row(BENCHMARK, f"{name}/seconds", record["seconds"], "s", runs=1),
    ]


def decode_row(metric: str, folders: Sequence[Path], rounds: int) -> Row:
    """Tokens a second of one greedy answer in our engine, beside the first of `folders`, which takes turns."""
    calls = [answer(folder) for folder in folders]
    speeds = [NEW_TOKENS / median(times) for times in interleaved(calls, rounds=rounds, seconds=0)]
    return new_row(
        BENCHMARK,
        f"{metric}/decode",
        speeds[1],
        "tok/s",
        runs=rounds,
        baseline=ORIGINAL,
        baseline_value=speeds[0],
    )


def answer(folder: Path) -> Callable[[], object]:
    """A function that answers one prompt of PROMPT_TOKENS tokens with NEW_TOKENS; the prompt is cached after the first
    call."""
    engine = load_engine(folder)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def run() -> None:
        engine.add(Request("0", list(range(100, 100 + PROMPT_TOKENS)), params))
        while engine.has_work():
            engine.step()

    return run


if __name__ == "__main__":
    raise SystemExit(guarded(main))
