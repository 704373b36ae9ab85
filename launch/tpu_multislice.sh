#!/usr/bin/env bash
# A learner on several equal slices: launch/tpu_vm.sh with SLICES, 2 unless given. One queued
# resource holds them all: they come, are preempted and are asked for again together. The mesh's
# data axis goes over the slices, the other axes stay inside one.
#
#     launch/tpu_multislice.sh [--dry-run] COMMAND     the commands of tpu_vm.sh
set -euo pipefail

[ "${SLICES:-2}" -ge 2 ] || {
  echo "error: SLICES=$SLICES: at least 2; launch/tpu_vm.sh is for one" >&2
  exit 1
}
SLICES=${SLICES:-2} exec "$(dirname "$0")/tpu_vm.sh" "$@"
