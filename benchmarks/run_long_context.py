"""Measure attention to a window and chosen blocks of keys beside full attention, in long contexts; appends rows.

    python benchmarks/run_long_context.py build/smollm2-int8                    # about an hour on one core
    python benchmarks/run_long_context.py build/smollm2-int8 --only steps       # what needs a quiet machine
    python benchmarks/run_long_context.py build/smollm2-int8 --only perplexity --table
    OMP_NUM_THREADS=1 python benchmarks/run_long_context.py build/smollm2-int8 --only steps --clock processor

`keys_read` are counted: keys that a decode step reads in all layers, beside the keys of the context; `bytes_read` has
the summaries too that it chooses by. `pass_key` is the negative log-likelihood a digit, in nats, of a
number that stands at one of nine depths of the context and is asked for at its end. Perplexity is that of the tokens
behind the 2048th of each window of held-out text. Both go through the step that serves, prompts in chunks, so that
every token chooses. `decode` are steps of one sequence in tokens a second, with both kinds in turns, at the last 16
places of the context, of which one ends a block. Processor time counts what threads wait too, so that it takes one
thread.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from lib.level import at_level
from lib.models import ARTIFACT, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from lib.texts import SOURCES
from run_kernels import Case, Rounds
from torch import Tensor

from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.text.corpus import code_text, heldout_text
from penjing.kernels.cpu.threads import default_threads
from penjing.kernels.decoder_step import DecoderStep
from penjing.serve.bench.lookups import loss_of, pass_keys
from penjing.serve.bench.one_sequence import CHUNK, PAGE, OneSequence
from penjing.serve.engine.config import EngineConfig, KvDtype
from penjing.serve.runner.key_blocks import bytes_per_page, full_layers_of, key_blocks_of
from penjing.serve.runner.kv_pool import bytes_per_block

CONTEXT = 8192
COUNTED_FROM = 2048  # before it the smallest budgets of the table read nearly everything too
DEPTHS = tuple(tenth / 10 for tenth in range(9, 0, -1))
KV_DTYPES: tuple[KvDtype, KvDtype] = ("float32", "int8")
CHOOSING = EngineConfig(attention="window+blocks")
TABLE = [(block, budget) for block in (16, 32, 64) for budget in (1024, 2048)]
FULL = "full attention"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ARTIFACT, help="an artifact or checkpoint")
    parser.add_argument("--windows", type=int, default=1, help=f"of {CONTEXT} tokens of prose, and as many of code")
    parser.add_argument("--table", action="store_true", help="perplexity by size of block and budget too")
    parser.add_argument(
        "--text", choices=["prose", "code", *SOURCES], help="perplexity of this text alone, and pass keys in it"
    )
    parser.add_argument("--kv", choices=KV_DTYPES, help="pass key and perplexity with this cache alone")
    parser.add_argument(
        "--full-layers", type=int, nargs="+", help="all but what is counted, with these layers reading all keys"
    )
    parser.add_argument("--budget", type=int, default=2048, help="of --full-layers: keys that the other layers read")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=("processor", "wall"), default="wall", help="of decode steps")
    parser.add_argument("--only", choices=["counts", "perplexity", "pass_key", "steps"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and default_threads() != 1:
        parser.error("--clock processor counts what threads wait too; set OMP_NUM_THREADS=1 and no PENJING_CPU_THREADS")
    warn_if_busy()
    loaded = load_model(arguments.model)
    step = fuse_decoder(loaded.model)
    if step is None:
        raise SetupError(f"{arguments.model} does not run as fused steps")
    kinds = KV_DTYPES if arguments.kv is None else (arguments.kv,)
    wanted = ("counts", "perplexity", "pass_key", "steps") if arguments.only is None else (arguments.only,)
    with torch.inference_mode():
        if "counts" in wanted:
            append("long_context", count_rows(loaded.config), arguments.results)
        if "perplexity" in wanted:
            for row in perplexity_rows(loaded, step, kinds, arguments):
                append("long_context", [row], arguments.results)
        if "pass_key" in wanted:
            pass_key_rows(loaded, step, kinds, arguments)
        if "steps" in wanted:
            append("long_context", at_level(step_rows(loaded.config, step, arguments)), arguments.results)
    return 0


def share_read(config: DecoderConfig, engine: EngineConfig, position: int, kind: KvDtype | None) -> float:
    """What a row at `position` reads in all layers, as a share of full attention: keys, or bytes of a kind of cache."""
    blocks, layers = key_blocks_of(engine), config.num_hidden_layers
    assert blocks is not None
    chosen = float(blocks.num_read(position))
    if kind is not None:
        key_bytes = bytes_per_block(config, 1, kind) / layers / config.num_key_value_heads
        chosen += blocks.num_scored(position) * 2 * (config.head_dim + 4) / key_bytes
    num_full = len(full_layers_of(engine))
    full = num_full * (position + 1)
    return (full + (layers - num_full) * chosen) / (layers * (position + 1))


def count_rows(config: DecoderConfig) -> list[Row]:
    rows: list[Row] = []
    for context in (8192, 16384):
        for kind in (None, *KV_DTYPES):
            name = f"keys_read_{context}" if kind is None else f"bytes_read_{context}_{kind}"
            share = share_read(config, CHOOSING, context - 1, kind)
            rows.append(new_row("long_context", name, share, "share", runs=0, baseline=FULL, baseline_value=1.0))
    for kind in KV_DTYPES:
        full = bytes_per_block(config, 1, "float32")
        held = bytes_per_block(config, 1, kind) + bytes_per_page(CHOOSING, config) / CHOOSING.block_size
        rows.append(
            new_row(
                "long_context", f"bytes_per_token_{kind}", held, "B", runs=0, baseline="float32 cache, full attention",
                baseline_value=full,
            )
        )  # fmt: skip
    return rows


def with_layers(arguments: argparse.Namespace) -> EngineConfig:
    """The engine of `--full-layers`."""
    settings = {"attention_full_layers": arguments.full_layers, "attention_budget": arguments.budget}
    return EngineConfig.model_validate(CHOOSING.model_dump() | settings)


def named_layers(arguments: argparse.Namespace) -> str:
    """What the names of rows with `--full-layers` have more."""
    return "" if arguments.full_layers is None else f"_full_layers_{'_'.join(map(str, arguments.full_layers))}"


def text_of(name: str, count: int = CONTEXT) -> str:
    """A text of so many tokens, or more."""
    if name == "code":
        return code_text(8 * count)
    return heldout_text() if name == "prose" else SOURCES[name].text()


def perplexity_rows(
    loaded: LoadedModel, step: DecoderStep, kinds: tuple[KvDtype, ...], arguments: argparse.Namespace
) -> Iterator[Row]:
    count = CONTEXT * arguments.windows
    names = ("prose", "code") if arguments.text is None else (arguments.text,)
    texts = {name: text_of(name, count) for name in names}
    suffix = named_layers(arguments)
    for name, text in texts.items():
        ids = torch.tensor(loaded.tokenizer.encode(text)[:count]).view(-1, CONTEXT)
        for kind in kinds:
            base = perplexity(loaded.config, step, ids, kind, EngineConfig())
            yield new_row("long_context", f"perplexity_{name}_{kind}_full", base, "perplexity", runs=1)
            for engine in [with_layers(arguments)] if suffix else engines(arguments.table and kind == kinds[0]):
                value = perplexity(loaded.config, step, ids, kind, engine)
                label = f"perplexity_{name}_{kind}_blocks_of_{engine.attention_block}_budget_{engine.attention_budget}"
                label += suffix
                yield new_row("long_context", label, value, "perplexity", runs=1, baseline=FULL, baseline_value=base)
                say(f"{label}: {value:.4f}, {value / base - 1:+.3%}")


def engines(table: bool) -> list[EngineConfig]:
    if not table:
        return [CHOOSING]
    return [
        EngineConfig.model_validate(
            {
                "attention": "window+blocks",
                "attention_block": block,
                "attention_budget": budget,
                "attention_sink": block,
                "attention_window": 256 if budget == 1024 else 512,
                "block_size": max(PAGE, block),
            }
        )
        for block, budget in TABLE
    ]


def perplexity(config: DecoderConfig, step: DecoderStep, windows: Tensor, kind: KvDtype, engine: EngineConfig) -> float:
    loss, tokens = 0.0, 0
    for ids_T in windows:
        cache = OneSequence.make(config, step, kind, engine, CONTEXT)
        for start in range(0, CONTEXT, CHUNK):
            counted = start >= COUNTED_FROM
            logits = cache.run(ids_T[start : start + CHUNK], start, torch.arange(CHUNK if counted else 0))
            if counted:
                following = ids_T[start + 1 : start + CHUNK + 1]
                loss += F.cross_entropy(logits[: len(following)].double(), following, reduction="sum").item()
                tokens += len(following)
    return math.exp(loss / tokens)


def pass_key_rows(
    loaded: LoadedModel, step: DecoderStep, kinds: tuple[KvDtype, ...], arguments: argparse.Namespace
) -> None:
    """Append the rows of each depth as it is measured; with `--full-layers` of the engine that has these alone."""
    folder: Path = arguments.results
    named = arguments.text or "prose"
    text, stem = text_of(named), "pass_key" if named == "prose" else f"pass_key_in_{named}"
    if arguments.full_layers is not None:
        engine = with_layers(arguments)
        share = share_read(loaded.config, engine, CONTEXT - 1, None)
        name = f"{named_layers(arguments)}_budget_{arguments.budget}"
        append("long_context", [new_row("long_context", f"keys_read_{CONTEXT}{name}", share, "share", runs=0)], folder)
        for kind in kinds:
            for depth, value in zip(DEPTHS, pass_key_losses(loaded, step, kind, engine, text), strict=True):
                row = new_row("long_context", f"{stem}_{kind}_depth_{depth:.1f}{name}", value, "nats", runs=1)
                append("long_context", [row], folder)
        return
    for kind in kinds:
        full, chosen = (pass_key_losses(loaded, step, kind, engine, text) for engine in (EngineConfig(), CHOOSING))
        for depth, base, value in zip(DEPTHS, full, chosen, strict=True):
            name = f"{stem}_{kind}_depth_{depth:.1f}"
            rows = [
                new_row("long_context", f"{name}_full", base, "nats", runs=1),
                new_row("long_context", name, value, "nats", runs=1),
            ]
            append("long_context", rows, folder)


def pass_key_losses(
    loaded: LoadedModel, step: DecoderStep, kind: KvDtype, engine: EngineConfig, text: str
) -> Iterator[float]:
    """Nats a digit at each depth. The text is computed once: less and less of it stands before the number."""
    cache = OneSequence.make(loaded.config, step, kind, engine, CONTEXT)
    for key in pass_keys(loaded.tokenizer, CONTEXT, DEPTHS, text):
        cache.prefill(key.before, 0)
        cache.prefill(key.text, key.at)
        rows = torch.arange(len(key.asked) - key.digits - 1, len(key.asked) - 1)
        yield loss_of(cache.run(key.asked, key.at + len(key.text), rows), key)


def step_rows(config: DecoderConfig, step: DecoderStep, arguments: argparse.Namespace) -> list[Row]:
    """Decode steps over random keys; how fast a choice is made does not depend on what is chosen."""
    step.max_positions = 16384  # what a position is rotated by does not matter here
    cases: dict[str, Case] = {}
    chooses = CHOOSING if arguments.full_layers is None else with_layers(arguments)
    suffix = f"{named_layers(arguments)}_budget_{arguments.budget}" if arguments.full_layers is not None else ""
    for context in (8192, 16384):
        for kind in KV_DTYPES:
            for name, engine in (("full", EngineConfig()), ("blocks", chooses)):
                sequence = OneSequence.make(config, step, kind, engine, context)
                cache, blocks = sequence.cache, sequence.blocks
                if cache.scale is None:
                    cache.pool.normal_()
                else:
                    cache.pool.random_(-127, 128)
                    cache.scale.uniform_(0.01, 0.02)
                if blocks is not None:
                    blocks.summary.random_(-127, 128)
                    blocks.summary_scale.uniform_(0.005, 0.01)
                places = cycle(range(context - PAGE, context))  # one of them ends a block, which is summed up
                run = lambda s=sequence, p=places: s.run(torch.tensor([7]), next(p), torch.arange(1))  # noqa: E731
                cases[f"{context}_{kind}_{name}"] = Case(run, 1, PAGE)
    busy = arguments.clock == "processor"
    rate = Rounds(cases, arguments.rounds, time.process_time if busy else time.perf_counter).rate
    clock = "_by_processor" if busy else ""
    return [
        new_row(
            "long_context",
            f"decode_{name}{suffix if name.endswith('blocks') else ''}{clock}",
            value,
            "tok/s of processor time" if busy else "tok/s",
            runs=arguments.rounds,
            baseline=None if name.endswith("full") else FULL,
            baseline_value=None if name.endswith("full") else rate[name.replace("blocks", "full")],
        )
        for name, value in rate.items()
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
