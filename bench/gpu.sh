#!/usr/bin/env bash
# All checks and measurements of the GPU kernels, in at most ten minutes on a machine with a GPU:
# every kernel against the reference, the table of rates, the tuner for the two hottest shapes.
# Without a GPU only the checks run, in Triton's interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  timeout 300 "$python" -m bench.gpu_kernels
  timeout 300 "$python" -m bench.tune 128 4 64 3
else
  echo 'no GPU: the kernels are checked in the interpreter, and nothing is measured'
  "$python" -m pytest -q tests/unit/kernels -m 'not aot'
fi
