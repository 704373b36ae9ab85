#!/usr/bin/env bash
# A role of a run on this machine, with its NVIDIA GPUs: a learner over one or more machines, or
# actors. Creates .venv, and starts the command again until the run has ended.
#
#     launch/gpu_host.sh [--dry-run] --config=... --workdir=gs://... --role=learner ...
#
# Several machines for one learner: run it on each, with --coordinator=HOST:PORT (the first
# machine, reachable from all), --num_processes=N and --process_index=I. Where a scheduler starts
# the processes (launch/slurm.sbatch, mpirun) they find each other.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

RESTART_S=${RESTART_S:-10}
dry_run=no
if [ "${1:-}" = --dry-run ]; then
  dry_run=yes
  shift
fi
[[ " $* " == *" --workdir="* ]] || {
  echo "error: usage: $0 [--dry-run] --config=... --workdir=... and further flags of the main command" >&2
  exit 1
}
# 75 where the learner is preempted: 0 is then the end of the run. Actors have no such value.
command=(.venv/bin/python -m uirl_jax.main "$@")
[[ " $* " == *" --role=actor "* ]] || command+=(--config.cluster.preempted_exit_code=75)

if [ $dry_run = yes ]; then
  echo ".venv/bin/python -m pip install -e '.[cuda,gcs]'"
  printf '%s ' "${command[@]}"
  echo
  exit
fi

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) || {
  echo "error: nvidia-smi shows no GPU; install NVIDIA's driver, 580 or newer" >&2
  exit 1
}
[ "${driver%%.*}" -ge 580 ] || {
  echo "error: NVIDIA's driver is $driver; CUDA 13 needs 580 or newer" >&2
  exit 1
}
make_environment .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cuda,gcs]'

child=
stopping=no
stop() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
# A signal may come before there is a child that it could be handed to.
started() {
  child=$1
  [ $stopping = no ] || stop
}
trap stop TERM INT
while :; do
  [ $stopping = no ] || exit 75 # a signal of the pause starts nothing
  "${command[@]}" &
  started $!
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` before the run has saved
    code=0
    wait "$child" || code=$?
  done
  [ $stopping = no ] || exit "$code"
  case $code in
    0 | 1) exit "$code" ;; # the run has ended; a mistake of the user's
  esac
  echo "ended with $code; again in $RESTART_S s" >&2
  sleep "$RESTART_S" &
  started $!
  wait "$child" || true
done
