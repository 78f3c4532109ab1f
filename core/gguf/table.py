"""What llama.cpp computes of a GGUF file, by its architecture: one table, by which files are read and written.

Sources: llama.cpp, src/models/*.cpp for what is computed and which tensors are there, conversion/*.py for how published
files are laid out. Its GELU is that of the tanh formula, also where a network was published with the other.
"""

from __future__ import annotations

from typing import Any

from penjing.core.gguf.architecture import HEAD, LONG, MLP, OUT, QKV, Architecture

_ALL = QKV | OUT | MLP
_DIVIDED = LONG | {"llama3"}  # and by a tensor of divisors
_NORM = frozenset({"norm"})
_SHIFTED = _NORM | {"shift"}
_GELU = {"mlp_gated": False, "activation": "gelu_tanh"}
_RELU2 = {"mlp_gated": False, "activation": "relu2"}
_AFTER = {"norms": "after", "qk_norm": True}
_GEMMA: dict[str, Any] = {"norms": "around", "activation": "gelu_tanh"}
_FINAL_CAP, _SCORE_CAP = "final_logit_softcapping", "attn_logit_softcapping"
_GATELESS = {"mlp.gate_proj": "ffn_up"}
_ONE_NORM = {"post_attention_layernorm": "attn_norm"}
_ALL_SAID = frozenset({"gating", "norm", "scale", "lead"})
CAPS = (_FINAL_CAP, _SCORE_CAP)

_PLAIN = (
    Architecture(
        "llama",
        "llama",
        experts={},
        expert_width="feed_forward_length",
        biases=_ALL,
        interleaved=True,
        scalings=_DIVIDED | {"longrope"},
        window="ignored",
    ),
    Architecture("qwen2", "qwen2", square=True),
    Architecture("qwen3", "qwen3", {"qk_norm": True}),
    Architecture("qwen2moe", "qwen2_moe", experts={"norm_topk_prob": False}, dense=False, shared="gated", square=True),
    Architecture("qwen3moe", "qwen3_moe", {"qk_norm": True}, experts={}, dense=False),
    Architecture("deci", biases=_ALL, interleaved=True, scalings=_DIVIDED | {"longrope"}, uneven=True),
    Architecture("smollm3", interleaved=True, rotates="fourth"),
    Architecture(
        "phi3",
        partial=True,
        square=True,
        fused=True,
        fused_mlp=True,
        scalings=LONG | {"longrope"},
        window="ignored",
    ),
    Architecture("seed_oss", names={"post_attention_layernorm": "post_attention_norm"}),
    Architecture("granite", biases=QKV | OUT, interleaved=True, scalings=_DIVIDED | {"longrope"}, factors="all"),
    Architecture(
        "granitemoe",
        experts={},
        expert_width="feed_forward_length",
        dense=False,
        shared="may",
        biases=QKV | OUT,
        interleaved=True,
        scalings=_DIVIDED | {"longrope"},
        factors="all",
    ),
    Architecture(
        "olmoe",
        fields={"qk_norm": True, "qk_norm_over": "all"},
        experts={"norm_topk_prob": False},
        expert_width="feed_forward_length",
        dense=False,
        tied=False,
        square=True,
        ungrouped=True,
    ),
    Architecture(
        "gpt-oss",
        fields={"attention_sinks": True},
        experts={"biases": True, "activation": "clamped_swiglu"},
        dense=False,
        biases=QKV | OUT,
        needed=OUT,
        tied=False,
        names={"post_attention_layernorm": "post_attention_norm"},
        window=2,
        always_slides=True,
        whole_pairs=False,
    ),
    Architecture("arcee", fields=_RELU2, names=_GATELESS, interleaved=True, scalings=_DIVIDED),
    Architecture("hunyuan-dense", fields={"qk_norm": True, "qk_norm_rotated": True}),
    Architecture(
        "lfm2", fields={"qk_norm": True}, square=True, outside={"model.norm": "token_embd_norm"}, convolves=True
    ),
)
_ROUTED = (
    Architecture(
        "lfm2moe",
        fields={"qk_norm": True},
        experts={},
        dense=False,
        choice="must",
        routing=frozenset({"gating", "lead"}),
        square=True,
        outside={"model.norm": "token_embd_norm"},
        convolves=True,
    ),
    Architecture(
        "hunyuan-moe",
        fields={"qk_norm": True, "qk_norm_rotated": True},
        experts={},
        expert_width="feed_forward_length",
        dense=False,
        shared="must",
    ),
    Architecture(
        "minimax-m2",
        fields={"qk_norm": True, "qk_norm_over": "all"},
        experts={},
        expert_width="feed_forward_length",
        dense=False,
        choice="must",
        routing=frozenset({"gating"}),
        tied=False,
        partial=True,
    ),
    Architecture(
        "dots1",
        "dots1",
        fields={"qk_norm": True},
        experts={},
        dense=False,
        choice="may",
        shared="must",
        routing=_ALL_SAID,
        tied=False,
        ungrouped=True,
    ),
    Architecture(
        "glm4moe",
        experts={},
        choice="must",
        dense=False,
        shared="must",
        routing=_ALL_SAID,
        maybe_normed=True,
        names={"post_attention_layernorm": "post_attention_norm"},
        partial=True,
    ),
    Architecture(
        "exaone-moe",
        fields={"qk_norm": True},
        experts={},
        choice="may",
        dense=False,
        shared="must",
        routing=_ALL_SAID,
        scalings=_DIVIDED,
        window=4,
        usual_window=4096,
        always_slides=True,
        rotates="sliding",
    ),
    Architecture(
        "ernie4_5-moe",
        experts={},
        dense=False,
        choice="may",
        shared="may",
        routing=frozenset({"lead"}),
        biases=QKV | OUT,
        interleaved=True,
    ),
)
_AROUND = (
    Architecture("gemma", fields={"activation": "gelu_tanh"}, tied=True, scaled=True),
    Architecture(
        "gemma2",
        fields=_GEMMA,
        tied=True,
        scaled=True,
        wide_queries=46,
        window=2,
        usual_window=4096,
        always_slides=True,
        caps={_FINAL_CAP: ("logit_cap", 30.0), _SCORE_CAP: ("attention_cap", 50.0)},
    ),
    Architecture(
        "gemma3",
        fields=_GEMMA | {"qk_norm": True},
        scaled=True,
        wide_queries=62,
        scalings=frozenset({"default", "linear"}),
        window=6,
        rotates="local",
        local_base=10000.0,
        caps={_FINAL_CAP: ("logit_cap", None)},
    ),
    Architecture("olmo2", fields=_AFTER | {"qk_norm_over": "all"}, tied=False, square=True, window=4, rotates="local"),
    Architecture(
        "exaone4",
        fields=_AFTER,
        square=True,
        scalings=_DIVIDED,
        window=4,
        window_layers=64,
        usual_window=4096,
        always_slides=True,
        rotates="sliding",
    ),
    Architecture("glm4", fields={"norms": "around"}, interleaved=True, partial=True, fused_mlp=True),
)
_CENTRED = (
    Architecture(
        "command-r",
        fields={"parallel": True},
        layer_norm=True,
        stored=_NORM,
        tied=True,
        interleaved=True,
        square=True,
        names=_ONE_NORM,
        factors="logits",
    ),
    Architecture(
        "cohere2",
        fields={"parallel": True},
        layer_norm=True,
        stored=_NORM,
        tied=True,
        interleaved=True,
        square=True,
        names=_ONE_NORM,
        window=4,
        always_slides=True,
        rotates="sliding",
        factors="logits",
    ),
    Architecture("olmo", layer_norm=True, interleaved=True, square=True),
    Architecture(
        "starcoder2",
        fields=_GELU,
        biases=_ALL,
        needed=OUT | MLP,
        layer_norm=True,
        stored=_SHIFTED,
        square=True,
        names=_GATELESS,
    ),
    Architecture(
        "phi2",
        fields=_GELU | {"parallel": True},
        biases=_ALL | HEAD,
        needed=OUT | MLP | HEAD,
        layer_norm=True,
        stored=_SHIFTED,
        tied=False,
        partial=True,
        square=True,
        names=_GATELESS | _ONE_NORM,
    ),
    Architecture(
        "gptneox",
        fields=_GELU | {"activation": "gelu"},
        biases=_ALL,
        needed=_ALL,
        layer_norm=True,
        stored=_SHIFTED,
        tied=False,
        partial=True,
        square=True,
        fused=True,
        names=_GATELESS,
        flags={"use_parallel_residual": ("parallel", True)},
    ),
    Architecture(
        "nemotron",
        fields=_RELU2,
        biases=_ALL,
        layer_norm=True,
        stored=_SHIFTED,
        tied=False,
        partial=True,
        square=True,
        names=_GATELESS,
    ),
    Architecture(
        "jais2",
        fields=_RELU2,
        biases=_ALL,
        needed=OUT | MLP,
        layer_norm=True,
        stored=_SHIFTED,
        names=_GATELESS,
    ),
    Architecture("stablelm", layer_norm=True, stored=_SHIFTED, tied=False, partial=True, square=True),
    Architecture(
        "gpt2",
        fields=_GELU | {"learned_positions": True},
        biases=_ALL,
        needed=_ALL,
        layer_norm=True,
        stored=_SHIFTED,
        square=True,
        fused=True,
        names=_GATELESS,
        outside={"model.embed_positions": "position_embd"},
    ),
)
ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in (*_PLAIN, *_AROUND, *_CENTRED, *_ROUTED)}
"""general.architecture → what it is; a network is written as the first that computes it and holds its tensors."""
SPELLED = {"mistral": "llama"}
"""Other names of architectures in files."""
