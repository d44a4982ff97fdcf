#!/usr/bin/env bash
# Train under Slurm, one rank per task.
#
#   sbatch -N 2 --ntasks-per-node 4 examples/slurm.sh examples/train_gpt.py --steps 50
#   salloc -N 2 --ntasks-per-node 4 examples/slurm.sh examples/train_gpt.py    # or in the shell that salloc opens
#
# PYTHON is the interpreter (python3), equal on every node. Whatever else is exported goes to every rank.
#SBATCH --job-name=totalreduce
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "slurm.sh: no allocation: start it with sbatch, or in salloc" >&2
  exit 2
fi
if (($# == 0)); then
  echo "usage: sbatch -N <nodes> --ntasks-per-node <ranks> slurm.sh <script.py> [arguments]" >&2
  exit 2
fi

# Rank, size, rank 0's node and a port are in srun's variables; only the key by which ranks recognise each other is not.
if [[ -z ${TOTALREDUCE_JOB_KEY:-} && -z ${TOTALREDUCE_JOB_KEY_FILE:-} ]]; then
  TOTALREDUCE_JOB_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export TOTALREDUCE_JOB_KEY
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Since 22.05 srun does not read the job's SLURM_CPUS_PER_TASK.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# --export=ALL: the key must arrive even if the job was submitted with --export=NONE.
exec srun --label --kill-on-bad-exit=1 --export=ALL "${PYTHON:-python3}" -u "$@"
