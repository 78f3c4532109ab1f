"""The recipe's [parallel]: how many processes share what, and whether a model and a world allow it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig

Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]


class ParallelConfig(Config):
    """`dp` × `pp` × `cp` × `tp` processes; experts spread over `ep` of the `dp`."""

    dp: int | None = Field(
        default=None,
        ge=1,
        description="Groups that each see their own share of the batch; by default as many as the processes allow.",
    )
    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="What data parallelism spreads instead of copying (https://arxiv.org/abs/1910.02054): 0 nothing, 1 "
        "the optimiser's state, 2 also gradients, 3 also parameters.",
    )
    shards: int | None = Field(
        default=None,
        ge=2,
        description="Of the dp, how many neighbours ZeRO spreads over, such as the GPUs of a node; each such group "
        "holds a copy of the model (HSDP, https://arxiv.org/abs/2304.11277). By default all.",
    )
    tp: int = Field(default=1, ge=1, description="Processes that share each layer's matrices.")
    sequence: bool = Field(
        default=False,
        description="Between its matrix products, tensor parallelism also splits the tokens "
        "(https://arxiv.org/abs/2205.05198).",
    )
    pp: int = Field(default=1, ge=1, description="Processes of a pipeline, which share the layers.")
    gradients: Literal["float32", "int8", "powersgd"] = Field(
        default="float32", description='How data parallelism sends gradients; "powersgd" is for dp alone.'
    )
    schedule: Schedule = Field(default="1f1b", description="The order in which a pipeline works on its micro-batches.")
    stage_layers: tuple[int, ...] | Literal["cost"] | None = Field(
        default=None,
        description='Layers of each stage, in order; by default equally many; "cost" splits by their measured seconds.',
    )
    shares: Literal["equal", "auto"] = Field(
        default="equal",
        description="How many samples of a step each process of data parallelism computes: all equally many, or, with "
        '"auto", as many as suit its measured speed. The update stays the same.',
    )
    balance: bool = Field(
        default=False,
        description="The stages are measured while training, and micro-batches, of data.micro_batch at most, "
        "resized so that a step is shortest.",
    )
    micro_batches: int | None = Field(
        default=None, ge=1, description="Micro-batches of one pass through the pipeline; by default all of a step."
    )
    cp: int = Field(default=1, ge=1, description="Processes that share each sequence.")
    ep: int = Field(default=1, ge=1, description="Processes, of the dp, that share the experts of a layer.")
    timeout: float = Field(  # ten seconds to notice, tell and end make it a minute
        default=50.0,
        ge=1,
        description="Seconds that a process may be silent, or all of them idle, before the run ends; one that works "
        "may be without progress for ten times as long.",
    )

    @property
    def is_plain(self) -> bool:
        """Data parallelism alone, as without this section."""
        return self.zero == 0 and self.is_data_parallel

    @property
    def is_data_parallel(self) -> bool:
        """Each process runs the whole network on samples of its own, whoever holds the parameters."""
        return self.tp == self.pp == self.cp == self.ep == 1

    @property
    def stages_per_process(self) -> int:
        """Stages of the pipeline in one process."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes the gradients of weights apart from those of inputs."""
        return self.pp > 1 and self.schedule in ("zbv", "dualpipev")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_per_process

    def stages_of(self, rank: int) -> list[int]:
        """The stages of process `rank` of a pipeline: its own and, in a V, its mirror image, else one a round."""
        if self.stages_per_process == 1:
            return [rank]
        return [rank, 2 * self.pp - 1 - rank if self.schedule in ("zbv", "dualpipev") else self.pp + rank]

    def owner(self, stage: int) -> int:
        """The process of a pipeline that has `stage`."""
        return next(rank for rank in range(self.pp) if stage in self.stages_of(rank))

    def default_micro_batch(self, share: int) -> int:
        """Samples of a micro-batch where the recipe leaves it open: all of a group's `share` of the batch, or in a
        pipeline so few that there are two micro-batches for each stage (one where `balance` goes on from there), and
        an eighth where shares follow the processes' speed."""
        wanted = self.micro_batches or self.num_stages * (1 if self.balance else 2)
        if self.pp == 1 and self.shares == "equal":
            return share
        if self.pp == 1:
            return next(size for size in range(-(-share // 8), 0, -1) if share % size == 0)
        return max((size for size in range(1, share + 1) if share % size == 0 and share // size >= wanted), default=1)

    def spread(self, dp: int) -> int:
        """How many of the `dp` groups of processes ZeRO spreads over."""
        return (self.shards or dp) if self.zero else 1

    def data_size(self, world_size: int) -> int:
        """How many groups of processes see their own share of the batch.

        Raises:
            ConfigError: the mesh does not fill the world.
        """
        rest = self.tp * self.pp * self.cp
        dp = self.dp or max(world_size // rest, 1)
        if dp * rest != world_size:
            sizes = f"parallel.dp={self.dp or 'auto'} × pp={self.pp} × cp={self.cp} × tp={self.tp}"
            wanted = f"{dp * rest}" if self.dp else f"a multiple of {rest}"
            follow = ", or leave parallel.dp out, which then follows the processes" if self.dp else ""
            raise ConfigError(
                f"{sizes} needs {wanted} processes, this run has {world_size}; start {dp * rest} "
                f"(--launch {dp * rest}, or torchrun --nproc-per-node) or change the mesh{follow}"
            )
        return dp


def check_parallel(
    config: ParallelConfig,
    model: object,
    world_size: int,
    sequence_length: int | None,
    compiled: bool,
    any_vocabulary: bool = False,
) -> None:
    """Refuse a mesh that the model or the number of processes does not allow.

    Args:
        model: the recipe's model; anything but a `DecoderConfig` allows data parallelism and ZeRO alone.
        sequence_length: tokens of a sample; None without tokens.
        compiled: torch.compile is wanted.
        any_vocabulary: the loss takes all logits together, so that `tp` may share out a vocabulary unevenly.

    Raises:
        ConfigError: names the setting of [parallel] and the one that it collides with.
    """
    dp = config.data_size(world_size)
    if config.sequence and config.tp == 1:
        raise ConfigError("parallel.sequence = true splits tokens among parallel.tp processes; set parallel.tp above 1")
    if config.pp == 1 and (config.balance or config.stage_layers is not None):
        raise ConfigError("parallel.balance and parallel.stage_layers are for pipelines; set parallel.pp above 1")
    if config.gradients == "powersgd" and not config.is_plain:
        raise ConfigError("parallel.gradients = 'powersgd' is for parallel.dp alone; use 'int8'")
    if config.shares == "auto":
        _check_shares(config, model)
    if config.shards is not None:
        if config.zero == 0:
            raise ConfigError("parallel.shards is how many processes ZeRO spreads over; set parallel.zero to 1, 2 or 3")
        _divides("shards", config.shards, "parallel.dp", dp)
        if config.ep > 1:
            raise ConfigError(f"parallel.ep={config.ep} spreads experts over all of the dp; leave parallel.shards out")
        if config.gradients != "float32":
            raise ConfigError(
                f"parallel.gradients = {config.gradients!r} packs what goes within shards, and not between their "
                "copies; leave parallel.shards out, or set gradients = 'float32'"
            )
    if compiled and (config.schedule in ("zbv", "dualpipev") or config.balance):
        why = (
            "balance = true resizes micro-batches, and each size would be compiled anew"
            if config.balance
            else f"schedule = {config.schedule!r} splits the backward pass, which compiled blocks do not"
        )
        raise ConfigError(f"parallel.{why}; change that, or set compile = false")
    if isinstance(model, DecoderConfig):
        _check_decoder(config, model, dp, sequence_length or 0, any_vocabulary)
    elif config.tp * config.pp * config.cp * config.ep > 1:
        raise ConfigError("parallel.tp, pp, cp and ep are for decoders; this model takes parallel.dp and parallel.zero")


def _check_shares(config: ParallelConfig, model: object) -> None:
    split = [f"{name} = {size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(config, name)) > 1]
    split += [f"zero = {config.zero}"] if config.zero else []
    if split:
        raise ConfigError(
            f"parallel.shares = 'auto' is for data parallelism alone: with parallel.{split[0]} processes exchange "
            "something in every micro-batch, of which all need equally many; leave one of the two out"
        )
    if isinstance(model, DecoderConfig) and model.moe is not None:
        raise ConfigError(
            "parallel.shares = 'auto' gives processes unlike numbers of micro-batches, and the load of experts is "
            "counted over all processes in each; set it to 'equal'"
        )


def _check_decoder(config: ParallelConfig, model: DecoderConfig, dp: int, length: int, any_vocabulary: bool) -> None:
    if config.tp > 1:
        _check_tensors(config.tp, model, any_vocabulary)
    if config.sequence:
        _divides("tp", config.tp, "data.sequence_length (parallel.sequence)", length)
    if model.shared_layers > 1 and not config.is_plain:
        raise ConfigError("model.shared_layers: layers that share weights allow data parallelism alone (zero = 0)")
    if config.pp > 1:
        _check_stages(config, model)
    if config.cp > 1:
        _check_context(config, model, length)
    if config.ep > 1:
        _check_experts(config, model, dp)


def _check_tensors(tp: int, model: DecoderConfig, any_vocabulary: bool) -> None:
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in split if any_vocabulary else (*split, "vocab_size"):
        _divides("tp", tp, f"model.{name}", getattr(model, name))
    if model.latent_attention is not None:
        raise ConfigError(f"parallel.tp={tp}: latent attention is not split by it; use zero = 3")
    if model.qk_norm_over == "all":
        raise ConfigError(f"parallel.tp={tp}: model.qk_norm_over='all' spans the heads that it splits; use zero = 3")
    names = (
        "inner_norms",
        "mlp_gated",
        "parallel",
        "head_bias",
        "logit_cap",
        "learned_positions",
        "attention_sinks",
        "table_hadamard",
        "conv_taps",
        "layer_scales",
        "token_inputs",
        "shared_keys",
    )
    if found := [each for each in model.departures() if each.startswith(names)]:
        raise ConfigError(f"parallel.tp={tp}: it does not split a model with {', '.join(found)}; use zero = 3")
    if model.moe is not None and model.moe.output_norms:
        raise ConfigError(f"parallel.tp={tp}: model.moe.output_norms are of whole sums, which it splits; use zero = 3")
    if model.moe is not None:
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            _divides("tp", tp, f"model.moe.{name}", getattr(model.moe, name) or 0)
    if "lsh_attention" in (model.layer_types or ()):
        raise ConfigError(f"parallel.tp={tp}: lsh_attention hashes all heads together; use zero = 3")


def _check_stages(config: ParallelConfig, model: DecoderConfig) -> None:
    stages = config.num_stages
    if stages > model.num_hidden_layers:
        layers = model.num_hidden_layers
        raise ConfigError(
            f"parallel.pp={config.pp} ({stages} stages with schedule {config.schedule!r}) is more than "
            f"model.num_hidden_layers={layers}; take pp = {layers * config.pp // stages} or less"
        )
    if model.learned_positions:
        raise ConfigError(f"parallel.pp={config.pp}: stages do not know model.learned_positions; use zero = 3")
    for name in ("token_inputs", "shared_keys"):
        if getattr(model, name):
            raise ConfigError(f"parallel.pp={config.pp}: stages do not know model.{name}; use zero = 3")
    counts = config.stage_layers
    if isinstance(counts, tuple) and (
        len(counts) != stages or sum(counts) != model.num_hidden_layers or min(counts) < 1
    ):
        raise ConfigError(
            f"parallel.stage_layers={list(counts)}: {stages} numbers of 1 or more are needed, in all "
            f"model.num_hidden_layers={model.num_hidden_layers}"
        )
    if model.tie_word_embeddings and config.schedule in ("zbv", "dualpipev"):
        raise ConfigError(
            f"parallel.schedule = {config.schedule!r} puts the first and the last stage into one process, which "
            "model.tie_word_embeddings = true does not allow; set it to false, or use '1f1b' or 'interleaved'"
        )
    if model.moe is not None and config.schedule in ("zbv", "dualpipev"):
        raise ConfigError(
            f"parallel.schedule = {config.schedule!r} splits the backward pass, which experts do not; use "
            "'1f1b' or 'interleaved'"
        )
    if model.moe is not None and config.balance:
        raise ConfigError(
            "parallel.balance = true resizes micro-batches, and the load of experts is judged in each; set it to false"
        )


def _check_context(config: ParallelConfig, model: DecoderConfig, length: int) -> None:
    cp = config.cp
    unknown = {
        "attention_cap": model.attention_cap is not None,
        "attention_sinks": model.attention_sinks,
        "conv_taps": model.conv_taps,
    }
    if name := next((name for name, there in unknown.items() if there), None):
        raise ConfigError(f"parallel.cp={cp}: it does not know model.{name}; leave cp = 1")
    _check_pieces("2 × parallel.cp", 2 * cp, length)
    if config.sequence:
        _check_pieces("parallel.cp × parallel.tp", cp * config.tp, length)
    if "lsh_attention" in (model.layer_types or ()):
        raise ConfigError(f"parallel.cp={cp}: lsh_attention hashes the whole sequence; use cp = 1")


def _check_experts(config: ParallelConfig, model: DecoderConfig, dp: int) -> None:
    ep = config.ep
    if model.moe is None:
        raise ConfigError(f"parallel.ep={ep} spreads experts, and the model has none; set parallel.ep = 1")
    _divides("ep", ep, "model.moe.num_experts", model.moe.num_experts)
    _divides("ep", ep, "parallel.dp", dp)
    if config.gradients == "int8":
        raise ConfigError(f"parallel.ep={ep}: gradients of experts are not packed; set gradients = 'float32'")


def _divides(name: str, parts: int, whole_name: str, whole: int) -> None:
    if whole % parts:
        fitting = ", ".join(str(size) for size in range(1, min(whole, 64) + 1) if whole % size == 0)
        raise ConfigError(f"parallel.{name}={parts} does not divide {whole_name}={whole}; take one of {fitting}")


def _check_pieces(name: str, pieces: int, length: int) -> None:
    if length % pieces:
        below, above = length // pieces * pieces, -(-length // pieces) * pieces
        lengths = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"data.sequence_length={length} is cut into {name} = {pieces} pieces, and is no multiple of that; "
            f"take {lengths}"
        )
