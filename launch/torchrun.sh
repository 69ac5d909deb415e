#!/usr/bin/env bash
# One node: launch/torchrun.sh RECIPE OUT [further options of `atlas-memory train`]
# The same line again goes on from the newest whole checkpoint. PROCESSES: one for each accelerator.
set -euo pipefail

recipe=${1:?usage: launch/torchrun.sh RECIPE OUT [options of atlas-memory train]}
out=${2:?usage: launch/torchrun.sh RECIPE OUT [options of atlas-memory train]}
shift 2

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone \
    --nproc-per-node "${PROCESSES:-8}" \
    --max-restarts "${RESTARTS:-3}" \
    -m atlas_memory train "$recipe" --out "$out" --resume --quiet "$@"
