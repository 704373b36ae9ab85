#!/usr/bin/env bash
# Makes the environment if it is missing, then runs ruff, basedpyright and pytest. Arguments go to
# pytest: a file, -k name, or -n 0 to run in one process that --pdb can stop.
# CI (CI=true) also runs the tests marked `browser` and `tpu_aot`, and installs Chromium and the
# TPU's compiler for them.
set -euo pipefail
cd "$(dirname "$0")/.."

. launch/environment.sh
make_environment .venv test

export JAX_PLATFORMS=cpu
# Two processes may compile for a TPU at once; libtpu's lock file, for a host with one, would end the
# second. There is no TPU here.
export ALLOW_MULTIPLE_LIBTPU_LOAD=1
# Tests compile far more than they run: tests/test_packed_step.py takes 57 s of the processor for 97.
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
marks="not slow and not gpu and not tpu_aot and not browser"
more=()
if [ "${CI:-}" = "true" ]; then
  marks="not slow and not gpu"
  more=(--durations=40) # which tests to shorten when the whole takes too long
  install_browser .venv
  install_libtpu .venv
fi

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/basedpyright --pythonpath .venv/bin/python
# Two processes: most tests keep one core busy. The tests of a file stay together, they share models.
# A test that hangs would hold up CI until it is ended, and nobody would know which: the longest
# takes some 140 s.
.venv/bin/python -m pytest -n 2 --dist loadfile --timeout=1200 -m "$marks" "${more[@]}" "$@"
