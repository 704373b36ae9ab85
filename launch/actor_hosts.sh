#!/usr/bin/env bash
# Hosts that sample episodes for a run: a managed instance group, in the bucket's region. Values:
# launch/env.
#
#     launch/actor_hosts.sh [--dry-run] COMMAND
#
#     up       the group and its hosts, which install and start by themselves
#     start    copies code and config to the hosts again, restarts where something changed
#     status | logs | stop
#     delete   the group
#
# Host i plays the actors ACTOR_FIRST + i * ACTORS_PER_HOST and following. Hosts may come and go:
# the group restarts a preempted one under its name, and so with its numbers.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/cloud.sh

up() {
  local provisioning=()
  check_bucket
  check_network
  exists "ACTOR_IMAGE_FAMILY=$ACTOR_IMAGE_FAMILY" gcloud compute images describe-from-family \
    "$ACTOR_IMAGE_FAMILY" --project="$ACTOR_IMAGE_PROJECT" --format='value(name)' || [ "$DRY_RUN" = yes ] ||
    die "ACTOR_IMAGE_FAMILY=$ACTOR_IMAGE_FAMILY: none in $ACTOR_IMAGE_PROJECT; gcloud compute images list --project=$ACTOR_IMAGE_PROJECT --no-standard-images"
  actor_line
  upload_files "$GROUP" "$LINE"
  host_metadata "$GROUP" "$ACTOR_EXTRA"
  [ "$ACTOR_PROVISIONING" != spot ] || provisioning=(--provisioning-model=SPOT --instance-termination-action=STOP)
  # Hosts with GPUs cannot be moved while they run.
  make_hosts "$GROUP" "$ACTOR_HOSTS" --machine-type="$ACTOR_MACHINE" --image-project="$ACTOR_IMAGE_PROJECT" \
    --image-family="$ACTOR_IMAGE_FAMILY" --boot-disk-size="${ACTOR_DISK_GB}GB" \
    --maintenance-policy=TERMINATE --tags="$NAME-actor" --service-account="$RUN_ACCOUNT" ${provisioning[@]+"${provisioning[@]}"}
}

begin "up start status logs stop delete" "$@"
GROUP=$NAME-$ACTOR_GROUP
check_project
case $COMMAND in
  up) up ;;
  start)
    actor_line
    upload_files "$GROUP" "$LINE"
    on_hosts "$GROUP" "$ACTOR_HOSTS" "sudo bash /opt/uirl/files/host_boot.sh"
    ;;
  status)
    list_hosts "$GROUP"
    on_hosts "$GROUP" "$ACTOR_HOSTS" "sudo bash /opt/uirl/files/host.sh state"
    ;;
  logs) on_host "$GROUP" "$LOGS_OF" "sudo bash /opt/uirl/files/host.sh logs" ;;
  stop) on_hosts "$GROUP" "$ACTOR_HOSTS" "sudo bash /opt/uirl/files/host.sh stop" ;;
  delete) delete_hosts "$GROUP" ;;
esac
