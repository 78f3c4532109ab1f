#!/usr/bin/env bash
# Training over many nodes with Slurm: one torchrun a node, found by the first node's name.
#   sbatch --nodes 8 docker/slurm/train.sh build/decoder-1b-64.toml [more flags of penjing train]
# PYTHON names the interpreter that has penjing (default: python3). docs/parallel.md explains ports and variables.
#SBATCH --job-name=penjing-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=penjing-train-%j.log
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: sbatch --nodes N $0 RECIPE [flags of penjing train]" >&2
  exit 2
fi
if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
  echo "error: this is no Slurm job; start it with sbatch" >&2
  exit 2
fi

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# a port of the job's own: two jobs may share a node
port=$((20000 + SLURM_JOB_ID % 20000))
gpus=${SLURM_GPUS_ON_NODE:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-8} / gpus))}
if [ "$OMP_NUM_THREADS" -lt 1 ]; then export OMP_NUM_THREADS=1; fi

exec srun --kill-on-bad-exit=1 "${PYTHON:-python3}" -m torch.distributed.run \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "$gpus" \
  --max-restarts 3 \
  --rdzv-backend c10d \
  --rdzv-id "penjing-$SLURM_JOB_ID" \
  --rdzv-endpoint "$head_node:$port" \
  --module penjing.train "$@" --resume auto
