#!/usr/bin/env bash
# All that only a GPU can show, in at most ten minutes: every kernel against the reference; CUDA
# graphs against eager steps, and the tokens a second of the demo model; the table of rates; the
# tuner for the hottest shapes. With --cpu, or where no GPU is, the same checks run in Triton's
# interpreter and on the CPU, in small sizes, and nothing is measured.
#
#   bench/gpu.sh [--cpu]            PYTHON=python3 bench/gpu.sh to take another than .venv/bin/python
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
failed=0

# part SECONDS NAME COMMAND…: a part that fails, or takes too long, does not keep the others.
part() {
  local seconds=$1 name=$2 started=$SECONDS
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" || { echo "== $name: FAILED ($?)"; failed=1; }
  echo "== $name: $((SECONDS - started)) s"
}

if [[ ${1:-} != --cpu ]] && "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
  part 150 'kernels are right' "$python" -m bench.gpu_checks
  part 120 'the worker' "$python" -m bench.gpu_worker
  part 150 'rates' "$python" -m bench.gpu_kernels
  part 170 'tuner' "$python" -m bench.tune 128 4 128 8 64 3
else
  echo 'no GPU: checks in the interpreter, nothing is measured'
  interpreted='from tests.fakes import triton_interpreter as t; t.install()
import sys; from bench import gpu_checks; sys.exit(gpu_checks.main([]))'
  part 300 'kernels are right' "$python" -W ignore -c "$interpreted"
  part 150 'the worker' "$python" -m bench.gpu_worker --check --set DEVICE=cpu --set DTYPE=float32
fi
exit "$failed"
