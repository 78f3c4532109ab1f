"""`penjing train RECIPE --launch N`: torchrun on this machine, with the environment that the processes need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penjing.core.cluster.start import room_for_process
from penjing.core.errors import ConfigError
from penjing.core.memory import available_bytes
from penjing.train.batch_size import check_shares
from penjing.train.checks import check_output
from penjing.train.plan.preflight import check_recipe, check_run
from penjing.train.recipe.load import load_train_recipe
from penjing.train.recipe.recipe import parse_size

PROCESS = 200 << 20  # bytes that a process has to itself once it has imported torch


def launch(num_processes: int, recipe: Path, overrides: list[str], flags: Sequence[str]) -> int:
    """Run `python -m penjing.train RECIPE --set OVERRIDES FLAGS` in `num_processes` processes here, and wait.

    The cores are shared out between the processes unless OMP_NUM_THREADS is set. Ctrl-C and SIGTERM reach all of them,
    so that they save their state.

    Returns:
        The exit status: 0, or that of the process that failed first (128 + the signal that ended it).

    Raises:
        ConfigError: not even one process, or more than fit into memory or can share the batch, this is one of
            torchrun's already, the recipe wants another number, or one would need more than its memory.limit.
        InputError: its output is there already.
        SetupError: the machine has no room for another process.
    """
    if num_processes < 1:
        raise ConfigError(f"--launch {num_processes}: at least 1 process is needed")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--launch starts torchrun, which has started this process already: leave one of them out")
    asked = load_train_recipe(recipe, overrides)
    check_recipe(asked, num_processes)
    fitting = available_bytes() // PROCESS
    if num_processes > max(fitting, 1):
        raise ConfigError(
            f"--launch {num_processes}: so many processes do not fit into this machine's free memory; it has room for "
            f"{fitting}, of {PROCESS >> 20} MiB each before they train anything"
        )
    check_output(asked, is_new="--resume" not in flags, force="--force" in flags)
    if "--resume" not in flags:  # a run that goes on shares its batch anew
        check_shares(asked.data.batch_size, asked.parallel.data_size(num_processes), num_processes)
    if asked.memory.limit and "--resume" not in flags:  # else each process finds out what is free, or how to go on
        check_run(asked, num_processes, parse_size(asked.memory.limit))
    arguments = [str(recipe), *(flag for override in overrides for flag in ("--set", override)), *flags]
    threads = str(max(len(os.sched_getaffinity(0)) // num_processes, 1))
    command = [sys.executable, "-m", "penjing.train.launch.agent", "--standalone"]
    with room_for_process():
        process = subprocess.Popen(
            [*command, "--nproc-per-node", str(num_processes), "-m", "penjing.train", *arguments],
            stdin=subprocess.PIPE,  # it ends with this process, and torchrun then
            env={"OMP_NUM_THREADS": threads} | os.environ,
            start_new_session=True,  # else Ctrl-C would reach each process twice: from the terminal and from torchrun
        )
    with process:

        def forward(number: int, frame: object) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
