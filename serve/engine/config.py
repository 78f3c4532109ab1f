"""What `penjing serve --set NAME=VALUE` can change: the engine's settings, and those of models that are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from penjing.core.config import Config

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$")]
KvDtype = Literal["auto", "float32", "float16", "bfloat16", "int8"]
Device = Literal["auto", "cpu", "cuda"]
Speculate = Literal["off", "forced", "lookup", "draft"]
AttentionKind = Literal["full", "window+blocks"]


class EngineConfig(Config):
    """Limits and sizes of one engine; None is resolved once, when the engine is built."""

    device: Device = Field(
        default="cpu",
        description="Where the model runs. cuda: the Triton-language kernels, with CUDA graphs for decode. auto: cuda "
        "where there is one.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Activations and float weights. auto: float32 on a CPU, which knows no other, and bfloat16 on "
        "CUDA.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Capture decode steps of 1, 2, 4 … sequences at start (some seconds) and replay them: a step costs "
        "one launch.",
    )
    block_size: int = Field(
        default=16,
        ge=1,
        le=512,
        description="Tokens in a block of the KV cache: smaller shares and wastes less, larger reads faster.",
    )
    num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="Blocks of the KV cache, the reserved null block included. When left out: from kv_cache_bytes.",
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Bytes of the KV cache. When left out: a share of the memory that is available, and no more than "
        "can be used.",
    )
    kv_dtype: KvDtype = Field(
        default="auto",
        description="How keys and values are kept. auto: in dtype, but in 16 bits on a CPU where weights are "
        "quantized, which rounds far less than they do: in bfloat16 where the processor has AMX, whose tiles read "
        "prompts faster, else in float16. int8, with a scale for each token and head: nearly four times "
        "the tokens of float32 in the same bytes and faster answers to long prompts, for a small loss of accuracy.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt plus answer in tokens. When left out: the model's context, or what the KV cache "
        "holds if that is less. A model of longrope for a long context rotates as for its original one where this is "
        "within that.",
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        description="Token budget of a step: a longer prompt is computed in chunks beside the running answers.",
    )
    max_step_seconds: float = Field(
        default=0.1,
        ge=0,
        le=60,
        description="What a step should take at most while answers run: fewer tokens of prompts share it where they "
        "are slow, so that running answers do not halt for a long prompt. 0: as many as max_num_batched_tokens.",
    )
    max_num_sequences: int = Field(default=64, ge=1, le=4096, description="Sequences that run at once; more wait.")
    max_waiting_requests: int = Field(
        default=1024, ge=1, description="Requests that may wait; one more is refused as overloaded."
    )
    max_waiting_tokens: int = Field(
        default=1_000_000,
        ge=1,
        description="Prompt tokens that may wait in all; a prompt is always accepted when nothing waits.",
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse the KV blocks of a shared prefix.")
    watermark: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the KV blocks that admission leaves free for running answers to grow into: fewer "
        "preemptions.",
    )
    stream_interval: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Seconds between two responses of a server's stream, at least; what comes meanwhile is joined. The "
        "first token and the end of an answer never wait. A response costs about a millisecond of processor time; 0 "
        "sends each token at once.",
    )

    speculate: Speculate = Field(
        default="forced",
        description="Guess the next tokens of answers and check several in one step; no token changes. forced: what "
        "the form of a guided answer leaves no choice about, on a CPU. lookup: also what followed the same tokens in "
        "prompt or answer before. draft: "
        "also what the network in `draft` guesses where these know nothing better. How many are checked follows from "
        "what they cost and how often they come true, none where that does not pay.",
    )
    draft: Annotated[Path, AfterValidator(Path.absolute)] | None = Field(
        default=None,
        description="Of speculate = draft: the folder of a network that was trained for this model, see "
        "algorithm.kind = 'draft' of penjing train.",
    )
    attention: AttentionKind = Field(
        default="full",
        description="What a token reads of those before it. full: all keys. window+blocks: the last ones, the first "
        "ones, and blocks between them that it chooses by what is kept of each, attention_budget keys in all; long "
        "contexts are faster, and answers may differ. On a CPU, for models whose layers all see everything.",
    )
    attention_window: int = Field(
        default=512, ge=1, description="Of window+blocks: the last keys, which are always read."
    )
    attention_sink: int = Field(
        default=16, ge=0, description="Of window+blocks: the first keys of a text, which are always read."
    )
    attention_budget: int = Field(
        default=2048, ge=1, description="Of window+blocks: keys that a token reads, window and sink included."
    )
    attention_block: Literal[16, 32, 64] = Field(
        default=16, description="Of window+blocks: keys that are chosen together; block_size is a multiple of it."
    )
    attention_full_layers: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=2,
        description="Of window+blocks: layers that read all keys, by their numbers from 0, such as [7]; a number "
        "alone: so many at the start. A layer that looks up what was said once should be among them: "
        "penjing bench lookups finds it.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes of this machine that compute a step together, each with a part of the weights, the "
        "heads and the KV cache. No token changes. On a CPU, for dense decoders, without adapters, images, a draft "
        "network and window+blocks.",
    )
    adapters: dict[AdapterName, Annotated[Path, AfterValidator(Path.absolute)]] = Field(
        default_factory=dict,
        max_length=1024,
        description="Folders of LoRA adapters in PEFT's format, by the names that requests choose them by: letters, "
        "digits, _ and -, no digit first.",
    )
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="In what adapters are kept. auto: as they are stored beside float weights, bfloat16 beside integer "
        "ones, whose own rounding is far larger.",
    )
    take_weights: bool = Field(
        default=False,
        description="Whoever reaches gRPC may replace the weights, as penjing train does where data.servers names this "
        "server. On a CPU, of a checkpoint in floating point, which is then kept in float32.",
    )
    max_images: int = Field(default=16, ge=0, le=1024, description="Images of one request, of a model that sees.")
    max_image_bytes: int = Field(
        default=20 << 20, gt=0, description="Bytes of an encoded image; a larger one is refused unread."
    )
    max_image_pixels: int = Field(
        default=50_000_000, gt=0, le=1 << 30, description="Pixels of an image; a larger one is refused undecoded."
    )
    image_cache_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="What images were turned into is kept in so much memory: one that comes again is not computed.",
    )
    image_model: bool = Field(
        default=True,
        description="Of a served model that sees: the encoder of images is a Triton model of its own, `sight`, in a "
        "process of its own, which computes images of several requests in one batch while answers go on. false: it "
        "runs in the decoder's process.",
    )
    image_batch: int = Field(
        default=16, ge=1, le=1024, description="Images, or squares of them, that `sight` computes at once."
    )
    image_threads: int = Field(
        default=0, ge=0, le=1024, description="Threads of `sight`, which share a batch out. 0: one for each core."
    )

    @model_validator(mode="after")
    def _every_running_sequence_steps(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_sequences={self.max_num_sequences}: a running answer would miss its token; "
                f"raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _blocks_of_keys_fit(self) -> EngineConfig:
        if self.attention == "full":
            return self
        size = self.attention_block
        for name in ("attention_window", "attention_sink", "attention_budget", "block_size"):
            if (keys := getattr(self, name)) % size:
                fitting = [str(keys // size * size)] * (keys > size) + [str((keys // size + 1) * size)]
                raise ValueError(
                    f"{name}={keys} is not a multiple of attention_block={size}; take {' or '.join(fitting)}"
                )
        if self.attention_budget < self.attention_window + self.attention_sink:
            raise ValueError(
                f"attention_budget={self.attention_budget} is below attention_window={self.attention_window} and "
                f"attention_sink={self.attention_sink}, which it holds; raise it or lower these"
            )
        return self

    @model_validator(mode="after")
    def _parts_go_together(self) -> EngineConfig:
        without = {
            "speculate=draft": self.speculate == "draft",
            "attention=window+blocks": self.attention != "full",
            "adapters": bool(self.adapters),
            "device=cuda": self.device == "cuda",
            "take_weights": self.take_weights,
        }
        if self.tensor_parallel > 1 and (named := [name for name, given in without.items() if given]):
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} does not go with {', '.join(named)} so far; leave out one of "
                "them"
            )
        return self

    @model_validator(mode="after")
    def _a_draft_is_used(self) -> EngineConfig:
        if (self.speculate == "draft") != (self.draft is not None):
            raise ValueError(
                "speculate=draft needs the folder of a network; set draft=FOLDER too"
                if self.draft is None
                else "draft names a network, which speculate=draft asks; set that too"
            )
        return self


def with_defaults(config: EngineConfig | None, **values: Any) -> EngineConfig:
    """`config` with `values` where it says nothing itself."""
    given = {} if config is None else config.model_dump(exclude_unset=True)
    return EngineConfig.model_validate(values | given)


class BatchConfig(Config):
    """How requests for a model without a state of its own (tensors in, tensors out) are joined, and how many may wait.

    What comes while a batch runs makes up the next one. The model's process sees to that and to the limits, Triton
    server only to `preferred_batch_sizes` and `max_queue_delay`; in an export for the onnxruntime backend to all.
    """

    max_batch_size: int = Field(
        default=64, ge=1, le=4096, description="Rows that run at once; a request with more is refused."
    )
    preferred_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="A batch of such a size leaves at once; others wait for max_queue_delay. Empty: the largest alone.",
    )
    max_queue_delay: float = Field(
        default=0.0, ge=0, le=1, description="Seconds that a request waits for others while nothing runs."
    )
    max_queue_size: int = Field(
        default=1024, ge=1, description="Requests that may wait; one more is refused as overloaded."
    )
    queue_timeout: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that a request may wait before it is refused; a request's own timeout counts if it is "
        "shorter.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Parts of a batch run beside each other, one on each thread; fewer rows share all threads. 0: one "
        "for each core. In an export for the onnxruntime backend: threads of ONNX Runtime.",
    )

    @model_validator(mode="after")
    def _preferred_sizes_can_occur(self) -> BatchConfig:
        if too_large := [size for size in self.preferred_batch_sizes if size > self.max_batch_size]:
            raise ValueError(
                f"preferred_batch_sizes has {too_large[0]}, more than max_batch_size={self.max_batch_size}; "
                f"lower the first or raise the second"
            )
        return self
