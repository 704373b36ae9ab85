#!/usr/bin/env bash
# The first command: creates .venv, installs requirements.txt, trains the quickstart agent on this
# machine. Arguments go to the main command, for example --config.seed=1 --workdir=runs/seed1.
set -euo pipefail
cd "$(dirname "$0")/.."

. launch/environment.sh
make_environment .venv

config=configs/quickstart.py
workdir=runs/quickstart
arguments=()
for argument in "$@"; do
  case $argument in
    --config=*) config=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
    *) arguments+=("$argument") ;;
  esac
done
exec .venv/bin/python -m uirl_jax.main --config="$config" --workdir="$workdir" "${arguments[@]}"
