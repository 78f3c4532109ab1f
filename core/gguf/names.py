"""Names in GGUF files beside those of an architecture's tensors: rotary divisors and scalings, ends of turns, and parts
of tensors that hold all experts of a layer."""

from __future__ import annotations

import re

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; they follow from the configuration
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of longrope: divisors too
YARN_FIELDS = {  # below rope.scaling.
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
LLAMA3_FIELDS = {  # below rope.scaling. in files of ours; other files have the divisors alone
    "llama3_factor": "factor",  # not "factor", by which llama.cpp divides all frequencies again
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
}
END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]")
)
_OF_EXPERT = re.compile(r"(.+_exps)\.(\d+)\.(weight|bias)")


def tensor_of(name: str) -> tuple[str, int | None]:
    """The tensor of a file that `blk.3.ffn_up_exps.5.weight` is a part of, and 5; of another name itself and None."""
    found = _OF_EXPERT.fullmatch(name)
    return (name, None) if found is None else (f"{found[1]}.{found[3]}", int(found[2]))
