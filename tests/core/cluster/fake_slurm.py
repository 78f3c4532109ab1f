"""As much of Slurm as penjing calls: sbatch, squeue and scancel as scripts that run the jobs on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_SBATCH = """
import json, os, re, subprocess, sys
home = os.path.dirname(os.path.abspath(__file__))
open(home + "/asked.json", "w").write(json.dumps(sys.argv[1:]))
if os.environ.get("SLURM_REFUSES"):
    sys.exit("sbatch: error: invalid partition specified: " + os.environ["SLURM_REFUSES"])
said = dict(each.split("=", 1) for each in sys.argv[1:-1] if "=" in each)
last = int(re.match(r"0-(\\d+)", said["--array"])[1])
lost = os.environ.get("SLURM_LOSES", "").split()
jobs = "\\n".join(
    f"SLURM_ARRAY_TASK_ID={number} bash {sys.argv[-1]} > {said['--output'].replace('%a', str(number))} 2>&1"
    for number in range(last + 1) if str(number) not in lost
)
silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
running = subprocess.Popen(["bash", "-c", jobs + "\\n:"], start_new_session=True, **silent)
open(home + "/7.pid", "w").write(str(running.pid))
print("7;cluster")
"""
_SQUEUE = """
import os, sys
home = os.path.dirname(os.path.abspath(__file__))
if os.path.exists(home + "/7.gone"):
    sys.exit("slurm_load_jobs error: Invalid job id specified")
try:
    state = open("/proc/" + open(home + "/7.pid").read() + "/stat").read().rpartition(")")[2].split()[0]
except OSError:
    state = "Z"
print("" if state == "Z" else "7_[0-3]")
"""
_SCANCEL = """
import os, signal, sys
home = os.path.dirname(os.path.abspath(__file__))
open(home + "/cancelled", "w").write(sys.argv[1])
try:
    os.killpg(int(open(home + "/7.pid").read()), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the three commands on PATH; their folder, which gets asked.json (options of sbatch) and cancelled."""
    home = folder / "slurm-commands"
    home.mkdir()
    for name, code in (("sbatch", _SBATCH), ("squeue", _SQUEUE), ("scancel", _SCANCEL)):
        (home / name).write_text(f"#!{sys.executable}\n{code}")
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    return home
