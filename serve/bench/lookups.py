"""`penjing bench lookups`: which layers of a decoder look up what stood once, for `attention=window+blocks`.

A pass key stands once in a long text, at several depths, and is asked for at its end. The text is read in full; only
the tokens that ask and answer choose their blocks. Then each layer alone reads everything, and all others choose: the
layer with which the key is most likely is one that looks things up. It is taken, and the next one is looked for beside
it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.config import parse_config
from penjing.core.errors import InputError
from penjing.core.progress import Progress, Silent
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.text.corpus import heldout_text
from penjing.core.text.tokenizer import Tokenizer
from penjing.kernels.cpu.key_blocks import KeyBlocks, StepBlocks
from penjing.serve.bench.one_sequence import PAGE, OneSequence
from penjing.serve.engine.config import EngineConfig, KvDtype
from penjing.serve.runner.device import resolve_device
from penjing.serve.runner.key_blocks import check_key_blocks, key_blocks_of

DEPTHS = (0.8, 0.6, 0.4, 0.2)  # of the context, from its end to its start: less and less text is computed again
DIGITS = 5
CLOSE = 0.1  # nats a token more than full attention: the key is found
GAIN = 0.05  # nats a token that a further layer has to give
MOST = 4  # layers
FOUND = 1.6  # nats a token with full attention, at most; a digit that is guessed costs ln 10 = 2.3
SHOWN = 5  # layers


@dataclass(frozen=True)
class PassKey:
    """A text with a number in it that is asked for at its end."""

    at: int
    """Where the telling begins."""
    before: Tensor
    """int64: what stands before, for the first key of a text; the others find it computed."""
    text: Tensor
    """int64: from there on, up to the question."""
    asked: Tensor
    """int64: the question and the answer."""
    digits: int
    """Tokens at the end of `asked` that are the number."""


def bench_lookups(
    folder: Path, context: int, progress: Progress | None = None, engine_config: EngineConfig | None = None
) -> dict[str, Any]:
    """Look for the layers that `attention_full_layers` should name.

    Args:
        context: tokens of the text; the model's own context at most.
        engine_config: what it says about attention and the cache counts; `attention_full_layers` does not.

    Returns:
        `attention_full_layers`, and in nats a token of the key, averaged over depths, what full attention, these
        layers, the default (the first two) and the best single layers cost. `share_of_keys_read` is what a token at the
        end of the context reads.

    Raises:
        ConfigError: the settings do not fit the model or each other, or leave nothing to choose in the context.
        InputError: no decoder; the C++ step does not take it; or it does not find the key with full attention.
    """
    progress, given = progress or Silent(), engine_config or EngineConfig()
    loaded = load_model(folder)
    context = min(context, loaded.config.max_position_embeddings)
    values = given.model_dump() | {
        "attention": "window+blocks",
        "attention_full_layers": 0,
        "max_model_len": context,
        "speculate": "off",
    }
    engine = parse_config(EngineConfig, values, "--set")
    check_key_blocks(engine, loaded.config)
    kind = resolve_device(engine, loaded.config, loaded.scheme != "fp32").kv_dtype  # as it is served
    with torch.inference_mode():
        return _search(loaded, engine, kind, context, progress) | {"model": str(folder)}


def pass_keys(tokenizer: Tokenizer, context: int, depths: Iterable[float], text: str | None = None) -> list[PassKey]:
    """One for each depth, from the last to the first, in the same text of `context` tokens.

    Args:
        text: what they stand in; None: held-out help topics.

    Raises:
        InputError: the text that comes along is shorter, or the context has no room for number and question.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, allow_special=False, add_special=False)

    begin, random = tokenizer.encode(""), Random(0)  # begin-of-text, where the tokenizer puts one
    tokens = [*begin, *encode(heldout_text() if text is None else text)][:context]
    if len(tokens) < context:
        raise InputError(f"the text has {len(tokens)} tokens of this model; take --context {len(tokens)}")
    found: list[PassKey] = []
    for depth in depths:
        number = "".join(str(random.randrange(10)) for _ in range(DIGITS))
        told = encode(f"\n\nThe pass key is {number}. Remember it: {number} is the pass key.\n\n")
        question, answer = encode("\n\nWhat is the pass key? The pass key is"), encode(f" {number}")
        at = int(depth * context) // PAGE * PAGE
        end = context - len(told) - len(question) - len(answer)
        if end < at:
            raise InputError(
                f"at {depth} of {context} tokens there is no room for a number and a question of "
                f"{context - end} tokens of this model; take a longer --context"
            )
        rest = tokens[at:end]
        asked = torch.tensor([*question, *answer])
        before = torch.tensor([] if found else tokens[:at], dtype=torch.int64)
        found.append(PassKey(at, before, torch.tensor([*told, *rest]), asked, min(DIGITS, len(answer))))
    return found


def loss_of(logits_TV: Tensor, key: PassKey) -> float:
    """Nats a token of the number, from the logits of the rows before each token of it."""
    wanted = key.asked[-key.digits :]
    return F.cross_entropy(logits_TV[-key.digits :].double(), wanted).item()


class _Asker:
    """Asks for the keys, with the text read in full and one choice after the other of layers that read everything."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig, kind: KvDtype, context: int) -> None:
        step, blocks = fuse_decoder(loaded.model), key_blocks_of(engine)
        assert blocks is not None
        if step is None:
            raise InputError("attention=window+blocks needs the compiled step, which does not take this model here")
        self.keys = pass_keys(loaded.tokenizer, context, DEPTHS)
        self.layers, self.blocks = loaded.config.num_hidden_layers, blocks
        self._cache = OneSequence.make(loaded.config, step, kind, engine, context)
        assert self._cache.blocks is not None
        # With room for every block a row reads all of them, and summaries are written nevertheless.
        pages = -(-context // blocks.block)
        self.everything = KeyBlocks(blocks.block, blocks.sink, blocks.window, max(blocks.budget, pages))
        self._cache.blocks = replace(self._cache.blocks, blocks=self.everything, full_layers=frozenset())

    def losses(self, choices: Sequence[tuple[KeyBlocks, frozenset[int]]], progress: Progress) -> list[float]:
        """Of each choice (how the others choose, and the layers that read everything), averaged over the depths."""
        found: list[list[float]] = [[] for _ in choices]
        for key in self.keys:
            self._cache.prefill(key.before, 0)
            self._cache.prefill(key.text, key.at)
            for losses, (blocks, full_layers) in zip(found, choices, strict=True):
                losses.append(self._ask(key, blocks, full_layers))
                progress.advance()
        return [mean(losses) for losses in found]

    def _ask(self, key: PassKey, blocks: KeyBlocks, full_layers: frozenset[int]) -> float:
        kept = self._cache.blocks
        assert kept is not None
        choosing = [layer for layer in range(self.layers) if layer not in full_layers]
        # Copies, since what asks ends blocks of its own.
        choice = StepBlocks(blocks, full_layers, kept.summary[choosing], kept.summary_scale[choosing])
        rows = torch.arange(len(key.asked) - key.digits - 1, len(key.asked) - 1)
        return loss_of(self._cache.run(key.asked, key.at + len(key.text), rows, choice), key)


def serve_command(model: Path, kv_dtype: str, overrides: Sequence[str], layers: Sequence[int]) -> str:
    """What to type to serve with the layers that were found and the settings that they were found with."""
    found = {"attention": "window+blocks", "attention_full_layers": str(list(layers)).replace(" ", "")}
    kept = [each for each in overrides if each.partition("=")[0] not in found]
    kept += [] if kv_dtype == "auto" else [f"kv_dtype={kv_dtype}"]
    settings = [*kept, *(f"{name}={value}" for name, value in found.items())]
    return shlex.join(["penjing", "serve", str(model), *(part for each in settings for part in ("--set", each))])


def take_layers(
    none: float, alone: dict[int, float], whole: float, ask: Callable[[list[frozenset[int]]], list[float]]
) -> tuple[frozenset[int], float]:
    """The layers that should read everything, `MOST` at most, and the loss with them.

    Args:
        none: the loss with no such layer.
        alone: with each of them alone.
        whole: with full attention.
        ask: gives the losses with other sets of layers.
    """
    chosen, best, found = frozenset[int](), none, alone
    while True:
        loss, layer = min((loss, layer) for layer, loss in found.items())
        if best <= whole + CLOSE or loss > best - GAIN:
            return chosen, best
        chosen, best = chosen | {layer}, loss
        left = [layer for layer in alone if layer not in chosen]
        if len(chosen) == MOST or len(left) < 2 or best <= whole + CLOSE:
            return chosen, best
        found = dict(zip(left, ask([chosen | {layer} for layer in left]), strict=True))


def _search(
    loaded: LoadedModel, engine: EngineConfig, kind: KvDtype, context: int, progress: Progress
) -> dict[str, Any]:
    asker = _Asker(loaded, engine, kind, context)
    blocks, layers = asker.blocks, range(asker.layers)

    def ask(choices: list[frozenset[int]]) -> list[float]:
        progress.start("asking with a further layer", len(choices) * len(asker.keys))
        return asker.losses([(blocks, choice) for choice in choices], progress)

    nobody, first = frozenset[int](), frozenset(layers[:2])
    choices = [(asker.everything, nobody), (blocks, first), (blocks, nobody)]
    choices += [(blocks, frozenset((layer,))) for layer in layers]
    progress.start("asking with each layer", len(choices) * len(asker.keys))
    whole, default, none, *losses = asker.losses(choices, progress)
    if whole > FOUND:
        raise InputError(
            f"with full attention too this model does not find a number in {context} tokens ({whole:.2f} nats a token "
            "of it, where guessing a digit costs 2.3): nothing tells its layers apart"
        )
    alone = dict(zip(layers, losses, strict=True))
    chosen, best = take_layers(none, alone, whole, ask)
    read = len(chosen) * context + (len(layers) - len(chosen)) * blocks.num_read(context - 1)
    ordered = sorted(alone, key=lambda layer: alone[layer])[:SHOWN]
    return {
        "attention_full_layers": sorted(chosen),
        "nats_a_token_of_the_key": {
            "full_attention": whole,
            "these_layers": best,
            "the_first_two_layers": default,
            **{f"layer_{layer}_alone": alone[layer] for layer in ordered},
        },
        "context": context,
        "attention_budget": engine.attention_budget,
        "share_of_keys_read": read / (len(layers) * context),
    }
