"""Sampling by the engine that serves models, from the weights that are just being learnt.

The engine's decoder has the learner's own tensors where these are float32 on the CPU, so that an update is seen without
copying; what an adapter changes, lies elsewhere or is shared among processes is copied before answers are sampled, a
tensor at a time. An answer depends on its prompt, its seed and the weights alone, bit for bit, so the answers of a step
are the same in however many processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import LoadedModel
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.rope import inverse_frequencies
from penjing.core.runtime.batch_invariant import apply_batch_invariance
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.kv_pool import bytes_per_block
from penjing.serve.runner.load import make_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.adapter.lora import merged
from penjing.train.align.prompts import Sampled

_TOGETHER = 64  # answers that the engine computes at once


def cache_bytes(config: DecoderConfig, longest: int) -> int:
    """Of the keys and values of as many answers as are computed at once, each with a prompt of its own.

    Args:
        longest: tokens of a prompt and its answer at most.
    """
    size = EngineConfig().block_size
    return (1 + _TOGETHER * -(-longest // size)) * bytes_per_block(config, size, "float32")


def float_bytes(folder: Path) -> int:
    """Of the decoder in `folder`, in float32."""
    with torch.device("meta"):
        model = Decoder(open_checkpoint(folder).config)
    return sum(4 * parameter.numel() for parameter in model.parameters())


class AnySampler(Protocol):
    """What answers prompts. Who asks holds `busy` from `refresh` to the last answer, on whatever threads."""

    busy: threading.Lock

    def refresh(self) -> None:
        """Answer by the weights as they are now; without it, by those of the last time."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], samples: int, max_tokens: int, temperature: float
    ) -> list[list[Sampled]]:
        """`samples` answers to each prompt, of `max_tokens` tokens at most.

        Args:
            seeds: one for each prompt; 63 bits.
            temperature: 0 takes the likeliest tokens.

        Raises:
            InputError: the model's logits are not finite.
        """
        ...


class EngineSampler:
    """Samples from the model of an engine.

    Args:
        longest: tokens of a prompt and its answer at most.
    """

    def __init__(self, loaded: LoadedModel, longest: int) -> None:
        self.busy = threading.Lock()
        # Keys and values of a prompt are shared by its answers, and outlive no update.
        limits = EngineConfig(max_num_sequences=_TOGETHER, max_model_len=longest, enable_prefix_caching=False)
        self._engine: LLMEngine = make_engine(loaded, limits)

    def refresh(self) -> None:
        """See `AnySampler`; the model does not change."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], samples: int, max_tokens: int, temperature: float
    ) -> list[list[Sampled]]:
        """See `AnySampler`."""
        found = [[Sampled() for _ in range(samples)] for _ in prompts]
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            params = SamplingParams(
                n=samples,
                temperature=temperature,
                seed=seed,
                max_tokens=max_tokens,
                logprobs=0 if temperature else None,
            )
            self._engine.add_prepared(self._engine.prepare(Request(str(place), list(prompt), params)))
        while self._engine.has_work():
            for output in self._engine.step():
                if output.finish_reason == "error":
                    self._engine.abort_all()
                    raise InputError(f"no answer can be sampled: {output.error}; lower the learning rate")
                answer = found[int(output.request_id)][output.index]
                answer.tokens += output.token_ids
                for token, scores in zip(output.token_ids, output.logprobs or (), strict=False):
                    answer.logprobs.append(scores[token].logprob)
                answer.ended |= output.finish_reason == "stop"
        return found


class Sampler(EngineSampler):
    """Samples from a model that is being trained.

    Args:
        model: a `Decoder` with adapters or without, whole in this process or shared among several, which then all call
            `refresh` as often.
        config: its architecture.
        tokenizer: the folder of its tokenizer, which names the tokens that end an answer.
        longest: tokens of a prompt and its answer at most.
        scale: of the adapters' products; None: there are none.
        apart: the weights are copied, so that the learner may go on while answers are sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DecoderConfig,
        tokenizer: Path,
        longest: int,
        scale: float | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self._model, self._scale = model, scale
        with torch.device("meta"):
            decoder = Decoder(config)
        learners = dict(model.named_parameters())
        for name, parameter in list(decoder.named_parameters()):
            tensor = learners[name].detach()
            # What is not the learner's own float32 memory on the CPU gets memory here, filled by `refresh`.
            adapted = f"{name.removesuffix('.weight')}.lora_A.weight" in learners
            plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
            plain = plain and not isinstance(tensor, DTensor) and not apart
            mine = tensor if plain and not adapted else torch.empty(parameter.shape)
            owner, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(owner), leaf, nn.Parameter(mine, requires_grad=False))
        decoder.tie_weights()
        decoder.model.inverse_frequency = inverse_frequencies(config)
        apply_batch_invariance(decoder)
        self._own = dict[str, Tensor](decoder.named_parameters())
        loaded = LoadedModel(decoder.eval(), config, Tokenizer.from_folder(tokenizer), None, None, "fp32")
        super().__init__(loaded, longest)

    @torch.no_grad()
    def refresh(self) -> None:
        """See `AnySampler`."""
        for name, tensor in learnt_weights(self._model, self._scale):
            if name in self._own and self._own[name].data_ptr() != tensor.data_ptr():  # no head for values
                self._own[name].copy_(tensor)


def learnt_weights(model: nn.Module, scale: float | None) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model that is being trained, whole and as they are now, with adapters merged; processes that
    share it read them together.

    Args:
        scale: of the adapters' products; None: there are none.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward pass has gathered is of before the update
    learners = _Whole(dict(model.named_parameters()))
    yield from learners.items() if scale is None else merged(learners, scale)


class _Whole(Mapping[str, Tensor]):
    """Parameters of which many processes may each hold a part: whole when they are read, in all processes at once."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._parameters[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
