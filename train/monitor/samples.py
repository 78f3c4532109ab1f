"""What a decoder makes of a few prompts while it learns: greedy answers, printed and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penjing.core.files import writing
from penjing.core.models.attention import Attend, attend_last
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.monitor.sinks import drop_later
from penjing.train.processes.world import World


class _Cache:
    """The two halves of an `Attend` that keeps what the tokens of one text leave to those behind them."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: dict[int, Tensor] = {}

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if layer in self._kept:
            k, v = (torch.cat(pair, -3) for pair in zip(self._kept[layer], (k, v), strict=True))
        self._kept[layer] = k, v
        return attend_last(self._config, layer, q, k, v, sinks)

    def before(self, layer: int, x: Tensor, count: int) -> list[Tensor]:
        kept = self._rows.get(layer, x.new_zeros(*x.shape[:-2], count, x.shape[-1]))
        whole = torch.cat((kept, x), -2)
        self._rows[layer] = whole[..., x.shape[-2] :, :]
        return [whole[..., place : place + x.shape[-2], :] for place in range(count)]


@torch.no_grad()
def greedy(model: nn.Module, config: DecoderConfig, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The likeliest next tokens after `prompt`, up to a token that ends a text (which is left out), `max_tokens` or
    the longest context.

    Args:
        model: a `Decoder`, whole here or spread over processes that all call this.
    """
    device = next(model.parameters()).device
    cache, made = _Cache(config), list[int]()
    attend = Attend(cache.attention, cache.before)
    tokens, place = torch.tensor([list(prompt)], device=device), 0
    while len(made) < max_tokens and place + tokens.shape[1] <= config.max_position_embeddings:
        positions = torch.arange(place, place + tokens.shape[1], device=device)[None]
        rows = torch.tensor([tokens.shape[1] - 1], device=device)
        best = int(model(tokens, positions, attend, logit_rows=rows)[0].argmax())
        if best in config.eos_token_ids:
            break
        made.append(best)
        place += tokens.shape[1]
        tokens = torch.tensor([[best]], device=device)
    return made


@dataclass(frozen=True)
class Samples:
    """Notes the answers to `prompts` (text, its tokens), and writes them to `path`."""

    config: DecoderConfig
    tokenizer: Tokenizer
    prompts: tuple[tuple[str, list[int]], ...]
    max_tokens: int
    path: Path
    progress: Progress

    def hook(self, model: nn.Module, world: World) -> Callable[[int], None]:
        """What the loop calls with the step's number; in all processes, of which the main one writes."""
        begun = False

        def show(step: int) -> None:
            nonlocal begun
            if world.is_main and not begun:
                drop_later(self.path, step - 1)  # what a run that was killed had kept, and which is answered again
                begun = True
            model.eval()
            for text, prompt in self.prompts:
                answer = self.tokenizer.decode(greedy(model, self.config, prompt, self.max_tokens))
                if world.is_main:
                    self._tell({"step": step, "prompt": text, "answer": answer})
            model.train()
            world.reshard(model)

        return show

    def _tell(self, sample: dict[str, str | int]) -> None:
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        self.progress.note(f"step {sample['step']}: {sample['prompt']!r} → {sample['answer']!r}")
