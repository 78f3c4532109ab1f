"""Memory and time of sliding-window and LSH attention against full attention: forward and backward, one layer at a time
and a whole model, in rows of benchmarks/results/attention.jsonl.

python benchmarks/run_attention.py                                # all contestants, 1k … 16k tokens: a few minutes
python benchmarks/run_attention.py --tokens 1024 4096 --rounds 1  # a part of it
python benchmarks/run_attention.py --metrics memory               # which another program's load does not change

Every contestant runs in a process of its own, whose peak memory is its own, above what it holds before the first pass.
Rounds are interleaved: each contestant is started once a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.rows import Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError

CONTESTANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window_512": {"sliding_window": 512},
    "window_1024": {"sliding_window": 1024},
    "lsh_1": {"layer_types": ["lsh_attention"], "lsh": {"chunk_size": 64, "rounds": 1}},
    "lsh_2": {"layer_types": ["lsh_attention"], "lsh": {"chunk_size": 64, "rounds": 2}},
}
LAYER = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
# The shape of recipes/decoder-tiny.toml, with room for long sequences.
MODEL = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 6}
SUBJECTS = {"layer": LAYER, "model": MODEL}
METRICS = {"step": ("seconds", "ms", 1e3), "memory": ("bytes", "MiB", 2**-20)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one", nargs=3, metavar=("SUBJECT", "CONTESTANT", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        subject, contestant, tokens = arguments.one
        print(json.dumps(measure(subject, contestant, int(tokens), arguments.threads, arguments.device)))
        return 0
    rows: list[Row] = []
    for subject in arguments.subjects:
        for tokens in arguments.tokens:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for _ in range(arguments.rounds):
                for name, results in found.items():
                    results.append(_in_a_process(subject, name, tokens, arguments.threads, arguments.device))
            rows += _rows(subject, tokens, found, arguments.device, arguments.metrics)
    append("attention", rows)
    return 0


def measure(subject: str, contestant: str, tokens: int, threads: int, device: str) -> dict[str, float]:
    """Seconds of a forward and backward pass (the fastest of at least two) and the bytes that it adds at its peak."""
    import torch

    from penjing.core.models.attention import Attention, causal_attention
    from penjing.core.models.config import DecoderConfig
    from penjing.core.models.decoder import Decoder
    from penjing.core.models.rope import inverse_frequencies
    from penjing.kernels.rotary import rotary_cos_sin

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    # The vocabulary is small so that logits do not hide what attention takes.
    sizes = {"vocab_size": 512, "intermediate_size": 512, "max_position_embeddings": tokens, "model_type": "penjing"}
    config = DecoderConfig.model_validate(SUBJECTS[subject] | sizes | CONTESTANTS[contestant])
    if subject == "layer":
        layer = Attention(config, 0).to(device)
        hidden = torch.randn(1, tokens, config.hidden_size, device=device, requires_grad=True)
        positions = torch.arange(tokens, device=device)[None]
        cos, sin = rotary_cos_sin(inverse_frequencies(config).to(device), positions)

        def step() -> None:
            layer(hidden, cos, sin, causal_attention(config)).square().mean().backward()
    else:
        model = Decoder(config).to(device)
        token_ids = torch.randint(0, 512, (1, tokens), device=device)

        def step() -> None:
            logits = model(token_ids)
            torch.nn.functional.cross_entropy(logits[0, :-1], token_ids[0, 1:]).backward()

    warm = _memory(device)
    times: list[float] = []
    while len(times) < 2 or (sum(times) < 1.0 and len(times) < 20):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"seconds": min(times), "bytes": _peak(device) - warm}


def _memory(device: str) -> int:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here: imports had their own
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def _peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def _in_a_process(subject: str, contestant: str, tokens: int, threads: int, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", subject, contestant, str(tokens)]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--device", device], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError(f"{contestant} on {tokens} tokens failed: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _rows(
    subject: str, tokens: int, found: dict[str, list[dict[str, float]]], device: str, metrics: list[str]
) -> list[Row]:
    rows = []
    prefix = subject if device == "cpu" else f"{subject}_{device}"
    for name, results in found.items():
        for what in metrics:
            key, unit, factor = METRICS[what]
            values = {
                contestant: statistics.median(result[key] for result in those) * factor
                for contestant, those in (("full", found["full"]), (name, results))
            }
            metric = f"{prefix}_{what}_{name}_{tokens}"
            if name == "full":
                rows.append(new_row("attention", metric, values[name], unit, runs=len(results)))
            else:
                against = "full attention (torch SDPA)"
                rows.append(
                    new_row(
                        "attention", metric, values[name], unit,
                        runs=len(results), baseline=against, baseline_value=values["full"],
                    )
                )  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
