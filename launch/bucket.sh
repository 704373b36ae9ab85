#!/usr/bin/env bash
# The bucket that learner and actors share, and the service account that they run as.
#
#     launch/bucket.sh [--dry-run] COMMAND
#
#     up       bucket in the region of ZONE, deletion of old shards, account, its role
#     delete   bucket with all runs in it, account; asks for CONFIRM=BUCKET
#
# The learner deletes a shard once its records are trained. The lifecycle rule deletes what an
# interrupted run left: shards of the runs in RUNS that are older than SHARD_DAYS.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/cloud.sh

# The lifecycle rule as JSON; one that exists is replaced.
lifecycle() {
  local run prefixes=''
  for run in $RUNS; do
    prefixes+=",\"$run/shards/\""
  done
  printf '{"rule": [{"action": {"type": "Delete"}, "condition": {"age": %s, "matchesPrefix": [%s]}}]}' \
    "$SHARD_DAYS" "${prefixes#,}"
}

up() {
  local rule
  # Deleted objects would be kept, and charged, for a week.
  if exists "BUCKET=$BUCKET" gcloud storage buckets describe "gs://$BUCKET" --format='value(location)'; then
    check_bucket
  else
    create "bucket gs://$BUCKET" gcloud storage buckets create "gs://$BUCKET" --project="$PROJECT" \
      --location="$REGION" --uniform-bucket-level-access --public-access-prevention \
      --soft-delete-duration=0
  fi
  rule=$(lifecycle)
  show printf '%s' "$rule" '|' gcloud storage buckets update "gs://$BUCKET" --lifecycle-file=/dev/stdin
  [ "$DRY_RUN" = yes ] ||
    printf '%s' "$rule" | gcloud storage buckets update "gs://$BUCKET" --lifecycle-file=/dev/stdin ||
    die "could not set the lifecycle of gs://$BUCKET"
  make_account "$RUN_ACCOUNT" "uirl_jax: learner and actors"
  # Objects only: read, write, list, delete. Not the bucket, not its roles.
  grant gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" \
    --member="serviceAccount:$RUN_ACCOUNT" --role=roles/storage.objectUser
}

delete() {
  [ "$DRY_RUN" = yes ] || [ "${CONFIRM:-}" = "$BUCKET" ] ||
    die "this deletes every run in gs://$BUCKET; CONFIRM=$BUCKET launch/bucket.sh delete"
  remove "bucket gs://$BUCKET" gcloud storage buckets describe "gs://$BUCKET" \
    --format='value(location)' -- gcloud storage rm --recursive "gs://$BUCKET"
  remove "service account $RUN_ACCOUNT" gcloud iam service-accounts describe "$RUN_ACCOUNT" \
    --project="$PROJECT" -- gcloud iam service-accounts delete "$RUN_ACCOUNT" --project="$PROJECT" --quiet
}

begin "up delete" "$@"
check_project
"$COMMAND"
