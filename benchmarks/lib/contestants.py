"""Who runs in the engine benchmark: each in an environment and a process of its own, reporting four figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from penjing.core.errors import InputError, SetupError

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).resolve().parents[1] / "peers"
METRICS = ("prefill_512", "one_stream", "streams_16", "decode_only_16")
RUN_SECONDS = 1800
OWN_INT8 = "penjing_int8"


@dataclass(frozen=True)
class Contestant:
    """`peers/bench_PROGRAM.py` run by `python` on `model`; for the peers `peers/PROGRAM.sh CHECKPOINT FILE` makes both.

    The program is called as the contestant, unless `program` says otherwise, with `options` behind the rest.
    """

    name: str
    python: Path
    model: Path
    program: str = ""
    options: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """The program's name."""
        return self.program or self.name

    def run(self, prompts: Path, runs: int, threads: int) -> dict[str, float | str]:
        """The four figures (tokens/s, medians of `runs`) and the contestant's full `name`.

        Raises:
            SetupError: it failed; the message has the end of what it said.
        """
        script = PEERS / f"bench_{self.script}.py"
        command = [str(self.python), str(script), str(self.model), str(prompts), str(runs), str(threads), *self.options]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        output = _run(command, environment, f"{self.name} in the engine benchmark")
        return json.loads(output.strip().splitlines()[-1])


def penjing(model: Path, kv_dtype: str = "auto") -> Contestant:
    """Ours, in process, with keys and values kept in `kv_dtype`."""
    return Contestant("penjing", Path(sys.executable), model, options=(kv_dtype,))


def penjing_server(model: Path) -> Contestant:
    """Ours, through a Triton server that it starts and ends."""
    return Contestant("penjing_server", Path(sys.executable), model)


def peers(checkpoint: Path) -> dict[str, Contestant]:
    """Those in 8 bits, by the name that `--peers` takes. Each runs what its script makes of `checkpoint`, or that."""
    home = ROOT / "build" / "peers"
    models = {
        "transformers": checkpoint,
        "llama_cpp": home / "llama_cpp" / "q8_0.gguf",
        "openvino": home / "openvino" / "model",
        "ort_genai": home / "ort_genai" / "model",
        "vllm": home / "vllm" / "model",
    }
    return {name: Contestant(name, home / name / "venv" / "bin" / "python", model) for name, model in models.items()}


def four_bit_peers(int8: Path) -> dict[str, Contestant]:
    """Those in 4 bits, by the name that `--peers` takes, and in 8 bits our own artifact `int8` and others."""
    models = {
        "llama_cpp_q4_0": ("llama_cpp", "q4_0.gguf"),
        "llama_cpp_q4_k_m": ("llama_cpp", "q4_k_m.gguf"),
        "openvino_int4": ("openvino", "model-int4"),
        "ort_genai_int4": ("ort_genai", "model-int4"),
        "vllm_w4a16": ("vllm", "model-int4"),
        "llama_cpp_q8_0": ("llama_cpp", "q8_0.gguf"),
        "openvino_int8": ("openvino", "model"),
        "vllm_w8a8": ("vllm", "model"),
    }
    return _own_and(int8, models)


def _own_and(int8: Path, models: dict[str, tuple[str, str]]) -> dict[str, Contestant]:
    """`int8`, and by their names the programs in `models` on their files."""
    home = ROOT / "build" / "peers"
    return {OWN_INT8: Contestant(OWN_INT8, Path(sys.executable), int8, "penjing")} | {
        name: Contestant(name, home / program / "venv" / "bin" / "python", home / program / file, program)
        for name, (program, file) in models.items()
    }


def gguf_peers(name: str, int8: Path) -> dict[str, Contestant]:
    """Those that read a GGUF file, by the name that `--peers` takes, and our own artifact `int8` beside them.

    Their model files begin with `name`.
    """
    models = {
        "llama_cpp_q4_k_m": ("llama_cpp", f"{name}-q4_k_m.gguf"),
        "llama_cpp_q8_0": ("llama_cpp", f"{name}-q8_0.gguf"),
        "transformers": ("transformers", name),
    }
    return _own_and(int8, models)


def choose(names: str, known: Sequence[str]) -> list[str]:
    """`"all"`, `"none"` or names joined by commas.

    Raises:
        InputError: a name that no peer has.
    """
    if names in ("all", "none"):
        return list(known) if names == "all" else []
    wanted = [name.strip().replace("-", "_").replace(".", "_") for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise InputError(f"no peer is called {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(wanted))


def prepare(peer: Contestant, source: Path) -> None:
    """Make the peer's environment and its model files of `source`, a checkpoint or a GGUF file, or keep them.

    Raises:
        SetupError: its script failed; the message has the end of what it said.
    """
    if peer.script != "penjing":
        command = ["bash", str(PEERS / f"{peer.script}.sh"), str(source)]
        if peer.program:
            command.append(peer.model.name)
        _run(command, dict(os.environ), f"making the peer {peer.name}")


@dataclass
class Outcome:
    """What interleaved rounds gave: results by contestant, and who failed and why."""

    results: dict[str, list[dict[str, float | str]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """The contestant's full name with its version."""
        return str(self.results[name][-1]["name"])

    def median(self, name: str, metric: str) -> float:
        """Of the rounds."""
        return median(float(result[metric]) for result in self.results[name])


def run_rounds(
    contestants: Sequence[Contestant],
    prompts: Path,
    *,
    rounds: int,
    runs: int,
    threads: int,
    say: Callable[[str], None],
) -> Outcome:
    """Every contestant once a round, each round beginning with another one; who fails once is left out."""
    outcome = Outcome()
    for turn in range(rounds):
        shift = turn % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            if contestant.name in outcome.missing:
                continue
            started = time.monotonic()
            try:
                result = contestant.run(prompts, runs, threads)
            except SetupError as error:
                outcome.missing[contestant.name] = str(error)
                outcome.results.pop(contestant.name, None)
                say(f"{contestant.name} is left out: {error}")
                continue
            outcome.results.setdefault(contestant.name, []).append(result)
            figures = ", ".join(f"{metric} {result[metric]}" for metric in METRICS)
            say(f"round {turn + 1}/{rounds}, {result['name']}: {figures} ({time.monotonic() - started:.0f} s)")
    return outcome


def _run(command: list[str], environment: dict[str, str], what: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"{what} took more than {RUN_SECONDS} s") from None
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise SetupError(f"{what} failed with exit code {done.returncode}:\n{end}")
    return done.stdout
