r"""Measure how far vLLM's answers are from our engine's, of the same integers; appends rows.

    bash benchmarks/peers/vllm.sh build/smollm2 model           # its environment and W8A8 folder; once
    bash benchmarks/peers/vllm.sh build/smollm2 model-int4      # its W4A16 folder, and the artifact that it is of
    python benchmarks/run_vllm_answers.py

Gemma 3, whose folder is one of penjing's own until it is exported, is asked with `--forms gemma3-w8a8` after

    penjing compress recipes/gemma3-int8.toml --out build/gemma3-int8-keep \
        --set steps.0.transform.hadamard_table=0 --set steps.0.transform.hadamard_down=0 \
        --set steps.0.lm_head=keep --set steps.0.embedding_dtype=float16
    penjing export build/gemma3-int8-keep build/gemma3-vllm --to compressed-tensors

Both continue 16 prompts of 128 held-out tokens with 64 tokens, greedily, and both read the prompts with our answers
behind them. Beside that stands what the integers change: the same of our engine on the floating checkpoint. Rows are
called FORM/WHO/METRIC, FORM such as `w8a8`, WHO `vllm` or `floats`:

- `equal_tokens`: share of the 64 tokens before the first that differs, a mean over the prompts.
- `likeliest`: share of our answers' tokens that are the likeliest there too.
- `nats_apart`: how far the log-probability of a token is off, a mean over all tokens that were read.
- `perplexity_rise`: of ours from theirs, on the prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.contestants import PEERS
from lib.models import ARTIFACT, CHECKPOINT, make_prompts, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

HOME = Path("build/peers/vllm")
PYTHON = HOME / "venv/bin/python"
FORMS = {
    "w8a8": (ARTIFACT, HOME / "model", CHECKPOINT),
    "w4a16": (HOME / "artifact-int4", HOME / "model-int4", CHECKPOINT),
    "gemma3-w8a8": (Path("build/gemma3-int8-keep"), Path("build/gemma3-vllm"), Path("build/gemma3")),
}
"""Name → artifact, folder that vLLM reads, and the checkpoint of both."""
NEW = 64
Tokens = list[int]


@dataclass(frozen=True)
class Answered:
    """What an engine says: `answers` behind the prompts, and of each text a (log-probability, rank) a further token."""

    name: str
    answers: list[Tokens]
    read: list[list[tuple[float, int]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="w8a8,w4a16", help="names joined by commas")
    parser.add_argument("--threads", type=int, default=1, help="of vLLM; ours takes OMP_NUM_THREADS")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for form in arguments.forms.split(","):
        artifact, folder, checkpoint = FORMS[form]
        for needed in (PYTHON, artifact, folder, checkpoint):
            if not needed.exists():
                raise SetupError(f"{needed} is missing; the commands before this benchmark's own, in --help, make it")
        begin = list(Tokenizer.from_folder(checkpoint).encode(""))  # as texts of this tokenizer do
        prompts: list[Tokens] = [begin + ids for ids in json.loads(make_prompts(checkpoint).read_text())["p16"]]
        say(f"{form}: our engine")
        engine = our_engine(artifact, len(prompts))
        answers = ask(engine, prompts, NEW)[0]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        here = Answered("penjing", answers, ask(engine, texts, 1)[1])
        say(f"{form}: vLLM")
        there = ask_vllm(folder, prompts, texts, arguments.threads)
        rows += form_rows(f"{form}/vllm", here, there, len(prompts[0]))
        say(f"{form}: our engine on the checkpoint")
        engine = our_engine(checkpoint, len(prompts))
        floats = Answered("penjing FP32", ask(engine, prompts, NEW)[0], ask(engine, texts, 1)[1])
        rows += form_rows(f"{form}/floats", here, floats, len(prompts[0]))
    append("vllm_answers", rows, arguments.results)
    return 0


def our_engine(folder: Path, num_sequences: int) -> LLMEngine:
    """Ours, without a prefix cache, so that it reads whole texts."""
    return load_engine(folder, EngineConfig(enable_prefix_caching=False, max_num_sequences=num_sequences))


def ask(engine: LLMEngine, texts: Sequence[Tokens], new: int) -> tuple[list[Tokens], list[list[tuple[float, int]]]]:
    """`new` tokens behind each text, greedily; and what the text's own tokens but the first were given."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, prompt_logprobs=0)
    for index, text in enumerate(texts):
        engine.add(Request(str(index), text, params))
    answers: list[Tokens] = [[] for _ in texts]
    read: list[list[tuple[float, int]]] = [[] for _ in texts]
    while engine.has_work():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
            read[int(output.request_id)] += _read(texts[int(output.request_id)], output)
    return answers, read


def _read(text: Tokens, output: RequestOutput) -> list[tuple[float, int]]:
    if output.prompt_logprobs is None:
        return []
    known = [(row or {})[token] for token, row in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
    return [(each.logprob, each.rank) for each in known]


def ask_vllm(folder: Path, prompts: list[Tokens], texts: list[Tokens], threads: int) -> Answered:
    """The same of vLLM, in its own environment: `NEW` tokens behind the prompts, and the texts read.

    Raises:
        SetupError: it failed; the message has the end of what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "asked.json", Path(scratch) / "answered.json"
        asked.write_text(json.dumps({"prompts": prompts, "texts": texts, "new": NEW}))
        command = [PYTHON, PEERS / "answers_vllm.py", folder, asked, answered, threads]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"vLLM failed on {folder}: {(done.stdout + done.stderr).strip()[-600:]}")
        found: dict[str, Any] = json.loads(answered.read_text())
    read = [[(logprob, rank) for logprob, rank in text] for text in found["read"]]
    return Answered(found["name"], found["answers"], read)


def form_rows(name: str, here: Answered, there: Answered, length: int) -> list[Row]:
    """Rows of two engines that read the same texts; the first `length` tokens of a text are its prompt."""
    # of each text, pairs of (log-probability, rank), ours and theirs, one for each token that follows another
    texts = [list(zip(mine, yours, strict=True)) for mine, yours in zip(here.read, there.read, strict=True)]
    tokens = [pair for text in texts for pair in text]
    prompts = [pair for text in texts for pair in text[: length - 1]]
    answers = [pair for text in texts for pair in text[length - 1 :]]
    values = {
        "equal_tokens": (100 * fmean(map(equal_share, here.answers, there.answers)), "%"),
        "likeliest": (100 * fmean(rank == 1 for _, (_, rank) in answers), "%"),
        "nats_apart": (fmean(abs(mine - yours) for (mine, _), (yours, _) in tokens), "nats"),
        "perplexity_rise": (100 * (math.exp(fmean(yours - mine for (mine, _), (yours, _) in prompts)) - 1), "%"),
    }
    return [
        new_row("vllm_answers", f"{name}/{metric}", value, unit, runs=len(here.answers), baseline=there.name)
        for metric, (value, unit) in values.items()
    ]


def equal_share(one: Tokens, other: Tokens) -> float:
    """Share of the tokens before the first that differs."""
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one)) / len(one)


if __name__ == "__main__":
    sys.exit(guarded(main))
