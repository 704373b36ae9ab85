#!/usr/bin/env bash
# A learner on a TPU slice of Cloud TPU, asked for as a queued resource. Values: launch/env.
#
#     launch/tpu_vm.sh [--dry-run] COMMAND
#
#     up       all that follows up to start; again after a failure or a change of code or config
#     create   asks for the slice; one that was suspended or failed is deleted first
#     wait     until it is ACTIVE
#     start    installs on all workers and starts the run there; restarts it where something changed
#     status   the slice, and the run on every worker
#     logs     follows the run on worker LOGS_OF
#     stop     ends the run, which saves; the slice goes on costing
#     delete   the slice
#     watch    keeps the run going: asks again for a slice that was preempted; ends with the run
#
# Workers install and start the run by their startup script (host_boot.sh), so that no worker is
# left out and a slice that comes back continues by itself. `start` waits for all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/cloud.sh

WATCH_FAILURES=5 # failed attempts in a row after which `watch` gives up
BOOT_S=900 # for a worker's startup script to copy the files

tpus() { echo gcloud compute tpus queued-resources "$1" "$SLICE" --project="$PROJECT" --zone="$ZONE"; }

# Sets STATE: empty where the slice does not exist.
read_state() {
  STATE=
  # shellcheck disable=SC2046 # the words of the command
  exists "slice $SLICE" $(tpus describe) --format='value(state.state)' && STATE=$ANSWER
  return 0
}

check_slice() {
  find_slice
  [ "$SLICES" -ge 1 ] || die "SLICES=$SLICES: at least 1"
  [ "$ROLE" != actor ] || [ "$((VMS * SLICES))" -eq 1 ] ||
    die "ROLE=actor: ACCELERATOR=$ACCELERATOR has $((VMS * SLICES)) VMs; actors run on slices of one VM, such as v6e-8, each with its own SLICE and ACTOR_FIRST"
}

check_cloud() {
  check_project
  check_bucket
  check_network
  exists "ZONE=$ZONE" gcloud compute tpus accelerator-types describe "$ACCELERATOR_TYPE" \
    --project="$PROJECT" --zone="$ZONE" --format='value(type)' || [ "$DRY_RUN" = yes ] ||
    die "ACCELERATOR=$ACCELERATOR: not offered in ZONE=$ZONE; gcloud compute tpus accelerator-types list --zone=$ZONE"
}

delete_slice() {
  # shellcheck disable=SC2046
  remove "slice $SLICE in $ZONE" $(tpus describe) -- $(tpus delete) --force --quiet
}

create_slice() {
  local words
  learner_line
  upload_files "$SLICE" "$LINE"
  read_state
  case $STATE in
    '') ;;
    FAILED | SUSPENDED) delete_slice ;;
    *)
      echo "slice $SLICE exists: $STATE"
      MADE+=("slice $SLICE in $ZONE")
      return
      ;;
  esac
  host_metadata "$SLICE" tpu+gcs
  # shellcheck disable=SC2207
  words=($(tpus create) --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION")
  if [ "$SLICES" -eq 1 ]; then
    words+=(--node-id="$SLICE")
  else
    words+=(--node-count="$SLICES" --node-prefix="$SLICE")
  fi
  case $PROVISIONING in
    spot) words+=(--spot) ;;
    reserved) words+=(--reserved) ;;
  esac
  words+=(--valid-until-duration="${WAIT_S}s" --network="$NETWORK" --subnetwork="$NETWORK" --internal-ips
    --tags="$NAME-${ROLE/all/learner}" --service-account="$RUN_ACCOUNT"
    --scopes=https://www.googleapis.com/auth/cloud-platform --metadata="$METADATA"
    --metadata-from-file=startup-script=launch/host_boot.sh)
  ask_for_slice "${words[@]}"
}

# A refusal deletes what the request may have left.
ask_for_slice() {
  local answer
  MADE+=("slice $SLICE in $ZONE")
  show "$@"
  [ "$DRY_RUN" = no ] || return 0
  answer=$("$@" 2>&1) && return
  printf '%s\n' "$answer" >&2
  delete_slice
  forget "slice $SLICE in $ZONE" # also where the request left nothing
  case $answer in
    *[Qq]uota* | *RESOURCE_EXHAUSTED*)
      die "no quota for $CHIPS chips of $ACCELERATOR, $PROVISIONING, in $ZONE: see docs/tpu_setup.md; nothing was made"
      ;;
  esac
  die "the slice was refused; nothing was made"
}

wait_for_slice() {
  local start=$SECONDS reason
  while :; do
    read_state
    [ "$DRY_RUN" = no ] || {
      echo "# repeated every $POLL_S s until ACTIVE, $WAIT_S s at most" >&3
      return
    }
    echo "state=${STATE:-none} waited_s=$((SECONDS - start))"
    case $STATE in
      ACTIVE) return ;;
      '') die "slice $SLICE does not exist; launch/tpu_vm.sh create asks for it" ;;
      FAILED)
        # shellcheck disable=SC2046
        read_cloud "slice $SLICE" $(tpus describe) --format='value(state.failedData.error.message)'
        reason=${ANSWER:-no reason given}
        delete_slice
        die "the request failed and was deleted: $reason"
        ;;
      SUSPENDING | SUSPENDED) die "slice $SLICE was preempted; launch/tpu_vm.sh watch asks for it again" ;;
    esac
    [ $((SECONDS - start)) -lt "$WAIT_S" ] || {
      delete_slice
      die "no slice within WAIT_S=$WAIT_S s; the request was deleted: try another zone, or spot"
    }
    sleep "$POLL_S"
  done
}

# on_workers WORKER COMMAND: on all nodes; the slice has no public addresses.
on_workers() {
  # shellcheck disable=SC2046
  set -- $(tpus ssh) --node=all --worker="$1" --tunnel-through-iap --quiet --command="$2"
  SSH=("$@")
}

start_workers() {
  local hosts different
  # The file is there once the startup script has copied from the bucket; it tries for five minutes.
  on_workers all "timeout $BOOT_S bash -c 'until [ -f /opt/uirl/files/host_boot.sh ]; do sleep 2; done' || { sudo journalctl --unit=google-startup-scripts --lines=20; exit 1; }; sudo timeout 1800 bash /opt/uirl/files/host_boot.sh"
  run "${SSH[@]}" || die "the run did not start on every worker; launch/tpu_vm.sh status"
  on_workers all "sudo bash /opt/uirl/files/host.sh versions"
  read_cloud "versions" "${SSH[@]}"
  [ "$DRY_RUN" = no ] || return 0
  hosts=$(grep -c 'uirl-versions host=' <<<"$ANSWER") || true
  [ "$hosts" -eq $((VMS * SLICES)) ] || die "$hosts of $((VMS * SLICES)) hosts answered: $ANSWER"
  different=$(sed -n 's/.*uirl-versions host=[^ ]* //p' <<<"$ANSWER" | sort | uniq -c)
  [ "$(wc -l <<<"$different")" -eq 1 ] || die "the hosts hold different versions: $ANSWER"
  echo "started on $hosts hosts:$different"
}

# Sets STATES: the state of the run on every worker, one a line.
worker_states() {
  on_workers all "sudo bash /opt/uirl/files/host.sh state"
  read_cloud "workers" "${SSH[@]}"
  STATES=$(grep -o 'uirl-state host=.*' <<<"$ANSWER") || true
}

status() {
  read_state
  [ "$DRY_RUN" = yes ] || echo "slice $SLICE: ${STATE:-does not exist}"
  if [ "$STATE" = ACTIVE ] || [ "$DRY_RUN" = yes ]; then
    worker_states
    [ "$DRY_RUN" = yes ] || echo "${STATES:-no worker answered}"
  fi
}

# One look of `watch`: 0 go on, 10 the run has ended, 11 a mistake of the user's, 12 stopped by hand,
# others a failure.
look() {
  read_state
  echo "state=${STATE:-none}"
  case $STATE in
    '' | FAILED | SUSPENDED) create_slice ;;
    ACTIVE)
      worker_states
      case $STATES in
        *state=failed*) exit 11 ;;
        *state=stopped*) exit 12 ;;
      esac
      [ -z "$STATES" ] || grep -qv ' state=ended ' <<<"$STATES" || exit 10
      ;;
  esac
}

watch() {
  local failures=0 code
  MADE+=("slice $SLICE in $ZONE")
  while :; do
    code=0
    (look) || code=$?
    [ "$DRY_RUN" = no ] || return 0
    case $code in
      0) failures=0 ;;
      10)
        echo "the run has ended; launch/tpu_vm.sh delete frees the slice"
        return
        ;;
      11) die "the run stopped on a mistake in its command or config; launch/tpu_vm.sh logs" ;;
      12) die "the run was stopped by hand; launch/tpu_vm.sh start continues it" ;;
      *)
        failures=$((failures + 1))
        [ "$failures" -lt "$WATCH_FAILURES" ] || die "$failures attempts in a row failed"
        ;;
    esac
    sleep "$POLL_S"
  done
}

begin "up create wait start status logs stop delete watch" "$@"
check_slice
case $COMMAND in
  up)
    check_cloud
    create_slice
    wait_for_slice
    start_workers
    ;;
  create)
    check_cloud
    create_slice
    ;;
  wait) wait_for_slice ;;
  start)
    check_project
    learner_line
    upload_files "$SLICE" "$LINE"
    start_workers
    ;;
  status) status ;;
  logs)
    on_workers "$LOGS_OF" "sudo bash /opt/uirl/files/host.sh logs"
    run "${SSH[@]}"
    ;;
  stop)
    on_workers all "sudo bash /opt/uirl/files/host.sh stop"
    run "${SSH[@]}"
    ;;
  delete) delete_slice ;;
  watch)
    check_cloud
    watch
    ;;
esac
