"""Measure caches of keys and values in 16 bits and INT8 against float32: perplexity, bytes, attention, decoder steps.

    python benchmarks/run_kv_cache.py build/smollm2-int8
    python benchmarks/run_kv_cache.py build/smollm2-int8 --only perplexity --text essays

Perplexity is that of held-out text in windows that start afresh, computed through the same step as serving, in chunks
of a prompt: queries read keys and values from the cache alone. Speeds are medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lib.level import at_level
from lib.models import ARTIFACT, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from lib.texts import SOURCES
from run_kernels import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, READ, Case, Rounds, reading
from torch import Tensor

from penjing.compress.samples.text import spread
from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.cli import guarded
from penjing.core.errors import InputError, SetupError
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.text.corpus import first_windows, heldout_text
from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.decoder_step import DecoderStep
from penjing.serve.engine.config import KvDtype
from penjing.serve.runner.kv_pool import allocate_cache, bytes_per_block

DTYPES: tuple[KvDtype, ...] = ("float32", "float16", "bfloat16", "int8")
FLOAT_CACHE = "float32 cache"
PAGES: dict[KvDtype, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MANUAL = "manual"  # Python's, as calibration's own
CHUNK = 256  # tokens of a window that share a step: later ones read what earlier steps stored


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ARTIFACT, help="an artifact or checkpoint")
    parser.add_argument("--tokens", type=int, default=8192, help="of text")
    parser.add_argument("--text", choices=[MANUAL, *SOURCES], default=MANUAL, help="held-out, or never calibrated on")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=["perplexity", "attention", "steps"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    kernels = extension()
    if kernels is None:
        raise SetupError("the C++ kernels are not built; install a C++17 compiler and run pip install -e . again")
    warn_if_busy()
    torch.set_num_threads(kernels.num_threads)
    rows: list[Row] = []
    with torch.inference_mode():
        if arguments.only in (None, "attention"):
            rows += attention_rows(kernels, arguments.rounds)
            rows += prompt_rows(kernels, arguments.rounds)
        if arguments.only in (None, "steps", "perplexity"):
            loaded = load_model(arguments.model)
            step = fuse_decoder(loaded.model)
            if step is None:
                raise SetupError(f"{arguments.model} does not run as fused steps")
            if arguments.only != "steps":
                rows += perplexity_rows(loaded, step, arguments.tokens, arguments.window, arguments.text)
            if arguments.only != "perplexity":
                rows += step_rows(kernels, loaded.config, step, arguments.rounds)
    append("kv_cache", at_level(rows, ("paged_decode", "prompt_attention", "decoder_step")), arguments.results)
    return 0


def perplexity_rows(loaded: LoadedModel, step: DecoderStep, num_tokens: int, window: int, text: str) -> list[Row]:
    if window % CHUNK or num_tokens % window or not window <= loaded.config.max_position_embeddings:
        raise InputError(
            f"windows of {window} tokens in {num_tokens}: multiples of {CHUNK}, within the model's context"
        )
    if text == MANUAL:
        windows_WT = first_windows(loaded.tokenizer, heldout_text(), num_tokens, window)
    else:
        ids = loaded.tokenizer.encode(SOURCES[text].text(), allow_special=False)
        windows_WT = spread(loaded.tokenizer, ids, num_tokens // window, window)
    value = {kind: perplexity(loaded.config, step, windows_WT, kind) for kind in DTYPES}
    kept = {kind: float(bytes_per_block(loaded.config, 1, kind)) for kind in DTYPES}
    end = "" if text == MANUAL else f"/{text}"
    figures = [(f"perplexity_{loaded.scheme}_{kind}_cache{end}", "perplexity", kind, value) for kind in DTYPES]
    if text == MANUAL:
        figures += [("bytes_per_token", "B", "int8", kept), ("float16_bytes_per_token", "B", "float16", kept)]
    return [
        new_row("kv_cache", name, of[kind], unit, runs=1)
        if kind == "float32"
        else new_row("kv_cache", name, of[kind], unit, runs=1, baseline=FLOAT_CACHE, baseline_value=of["float32"])
        for name, unit, kind, of in figures
    ]


def perplexity(config: DecoderConfig, step: DecoderStep, windows_WT: Tensor, kind: KvDtype) -> float:
    """exp of the mean negative log-likelihood of each next token of (W, T) windows."""
    window = windows_WT.shape[1]
    num_blocks = window // BLOCK_SIZE
    cache = allocate_cache(config, num_blocks, BLOCK_SIZE, kind)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    loss = 0.0
    for index, ids_T in enumerate(windows_WT):
        say(f"perplexity with a {kind} cache: window {index + 1} of {len(windows_WT)}")
        for start in range(0, window, CHUNK):
            end = start + CHUNK
            position = torch.arange(start, end)
            lengths = torch.tensor([0, CHUNK]).int(), torch.tensor([end]).int()
            rows = torch.arange(CHUNK).int()
            ids = ids_T[start:end].int()
            logits = step.step(ids, position.int(), position, *lengths, table, rows, cache.pool, cache.scale)
            next_ids = ids_T[start + 1 : end + 1]
            loss += F.cross_entropy(logits[: len(next_ids)].double(), next_ids, reduction="sum").item()
    return math.exp(loss / (windows_WT.numel() - len(windows_WT)))


def attention_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """One query a sequence over long contexts, in tokens of context a second; the limit is reading their bytes."""
    cases = {READ: reading(kernels)}
    token_bytes = {kind: 2 * KV_HEADS * bytes_of_row(kind) for kind in DTYPES}
    for sequences, context in ((24, 4096), (12, 8192), (1, 98304)):
        blocks = -(-context // BLOCK_SIZE)
        table = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0)).int()
        lengths = torch.arange(sequences + 1).int(), torch.full((sequences,), context).int()
        q = torch.randn(sequences, HEADS, HEAD_DIM)
        for kind in DTYPES:
            caches = random_layer(kernels, sequences * blocks, kind)
            arguments = (q, *caches[:2], *lengths, table.view(sequences, blocks), 0.125, None, *caches[2:])
            run = lambda a=arguments: kernels.paged_attention(*a, turned=True)  # noqa: E731
            cases[f"{kind} {sequences}x{context}"] = Case(run, sequences * context / 1e6, 2)
    rate = Rounds(cases, rounds).rate
    limit = rate.pop(READ) * 1e3  # MB/s
    return [
        new_row(
            "kv_cache",
            f"paged_decode_{name.replace(' ', '_')}",
            value,
            "Mkeys/s",
            runs=rounds,
            baseline=READ if kind == "float32" else FLOAT_CACHE,
            baseline_value=limit / token_bytes[kind] if kind == "float32" else rate["float32 " + shape],
            share_of_limit=value * token_bytes[kind] / limit,
        )
        for name, value in rate.items()
        for kind, shape in [name.split()]
    ]


def prompt_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """Attention of all tokens of a prompt; a score is a pair of a head's query and a key that it sees."""
    cases: dict[str, Case] = {}
    for tokens in (512, 2048, 8192):
        blocks = tokens // BLOCK_SIZE
        table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int()[None]
        lengths = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
        q = torch.randn(tokens, HEADS, HEAD_DIM)
        for kind in DTYPES:
            caches = random_layer(kernels, blocks, kind)
            arguments = (q, *caches[:2], *lengths, table, 0.125, None, *caches[2:])
            run = lambda a=arguments: kernels.paged_attention(*a, turned=True)  # noqa: E731
            cases[f"{kind} {tokens}"] = Case(run, HEADS * tokens * (tokens + 1) / 2 / 1e6, 1)
    rate = Rounds(cases, rounds).rate
    return [
        new_row("kv_cache", metric, value, "Mscores/s", runs=rounds)
        if kind == "float32"
        else new_row(
            "kv_cache",
            metric,
            value,
            "Mscores/s",
            runs=rounds,
            baseline=FLOAT_CACHE,
            baseline_value=rate[f"float32 {tokens}"],
        )
        for name, value in rate.items()
        for kind, tokens in [name.split()]
        for metric in [f"prompt_attention_{kind}_{tokens}"]
    ]


def bytes_of_row(kind: KvDtype) -> int:
    """Of a head's key or value, its scale included."""
    return HEAD_DIM + 4 if kind == "int8" else HEAD_DIM * PAGES[kind].itemsize


def random_layer(kernels: CpuExtension, num_blocks: int, kind: KvDtype) -> list[Tensor]:
    """Keys, values and, for int8, their scales."""
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    if kind != "int8":
        return [kernels.empty_pages(shape, PAGES[kind]).normal_() for _ in range(2)]
    pages = [kernels.empty_pages(shape, torch.int8).random_(-127, 128) for _ in range(2)]
    return pages + [kernels.empty_pages(shape[:3], torch.float32).uniform_(0.01, 0.02) for _ in range(2)]


def step_rows(kernels: CpuExtension, config: DecoderConfig, step: DecoderStep, rounds: int) -> list[Row]:
    """Whole decode steps at long contexts; the limit is one reading of the weights, keys and values."""
    cases = {READ: reading(kernels)}
    read_bytes: dict[str, int] = {}
    for sequences, context in ((1, 4096), (1, 8192), (8, 4096)):
        if context > config.max_position_embeddings:
            continue
        blocks = context // BLOCK_SIZE
        table = torch.randperm(sequences * blocks).int().view(sequences, blocks)
        lengths, each = torch.full((sequences,), context).int(), torch.arange(sequences + 1).int()
        slots = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        ids = torch.randint(0, config.vocab_size, (sequences,)).int()
        for kind in DTYPES:
            cache = allocate_cache(config, sequences * blocks, BLOCK_SIZE, kind)
            pool, scale = cache.pool, cache.scale
            pool.random_(-127, 128) if scale is not None else pool.normal_()
            if scale is not None:
                scale.uniform_(0.01, 0.02)
            arguments = (ids, lengths - 1, slots, each, lengths, table, each[:-1].clone(), pool, scale)
            name = f"{kind} {sequences}x{context}"
            cases[name] = Case(lambda a=arguments: step.step(*a), sequences, 4)
            read_bytes[name] = step.weight_bytes + sequences * context * bytes_per_block(config, 1, kind)
    rate = Rounds(cases, rounds).rate
    limit = rate.pop(READ) * 1e9
    return [
        new_row(
            "kv_cache",
            f"decoder_step_{name.replace(' ', '_')}",
            value,
            "tok/s",
            runs=rounds,
            baseline=None if kind == "float32" else FLOAT_CACHE,
            baseline_value=None if kind == "float32" else rate["float32 " + shape],
            share_of_limit=value / int(shape.split("x")[0]) * read_bytes[name] / limit,
        )
        for name, value in rate.items()
        for kind, shape in [name.split()]
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
