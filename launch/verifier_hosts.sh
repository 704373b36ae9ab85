#!/usr/bin/env bash
# A pool of the bundled verifier server (docs/bundled_server.md). Values: launch/env; set
# VERIFIERS=pool there, and learner and actors use it.
#
#     launch/verifier_hosts.sh [--dry-run] COMMAND
#
#     up       account, token, firewall rule, group and its hosts
#     urls     the servers' addresses, as cfg.verifier.urls has them
#     start    copies the code to the hosts again, restarts where something changed
#     status | logs | stop
#     delete   all that `up` made
#
# The hosts have no public address, and the firewall lets only actors and the learner in, which plays
# where ROLE=all and where it evaluates. The token is made here, held by Secret Manager, and read by
# the hosts into memory: it is on no disk and in no command line.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/cloud.sh

# What every host runs. Actors name a host by its internal DNS name, which the server must know.
verifier_line() {
  LINE="exec /opt/uirl/venv/bin/python -m uirl_jax.verifiers.server --host=0.0.0.0 --port=$VERIFIER_PORT"
  LINE+=" --allow-host=\$(hostname -s).$VERIFIER_DOMAIN --token-file=/run/uirl/verifier_token"
  LINE+=" --max-browsers=$VERIFIER_BROWSERS"
}

make_token() {
  local account
  if ! exists "secret $SECRET" gcloud secrets describe "$SECRET" --project="$PROJECT"; then
    create "secret $SECRET" gcloud secrets create "$SECRET" --project="$PROJECT" --replication-policy=automatic
  fi
  # A secret without a version is what an interrupted `up` left.
  read_cloud "secret $SECRET" gcloud secrets versions list "$SECRET" --project="$PROJECT" \
    --filter=state=enabled --format='value(name)'
  if [ -z "$ANSWER" ]; then
    show openssl rand -hex 32 '|' gcloud secrets versions add "$SECRET" --project="$PROJECT" --data-file=-
    [ "$DRY_RUN" = yes ] ||
      openssl rand -hex 32 | gcloud secrets versions add "$SECRET" --project="$PROJECT" --data-file=- ||
      die "could not store the token"
  fi
  for account in "$RUN_ACCOUNT" "$VERIFIER_ACCOUNT"; do
    grant gcloud secrets add-iam-policy-binding "$SECRET" --project="$PROJECT" \
      --member="serviceAccount:$account" --role=roles/secretmanager.secretAccessor
  done
}

# The verifiers read the files of the hosts, and no run.
grant_files() {
  exists "folder gs://$BUCKET/launch/" gcloud storage managed-folders describe "gs://$BUCKET/launch/" ||
    create "folder gs://$BUCKET/launch/" gcloud storage managed-folders create "gs://$BUCKET/launch/"
  grant gcloud storage managed-folders add-iam-policy-binding "gs://$BUCKET/launch/" \
    --member="serviceAccount:$VERIFIER_ACCOUNT" --role=roles/storage.objectViewer
}

open_firewall() {
  local players=$NAME-actor,$NAME-learner
  if exists "firewall rule $NAME-verifier" gcloud compute firewall-rules describe "$NAME-verifier" \
    --project="$PROJECT"; then
    run gcloud compute firewall-rules update "$NAME-verifier" --project="$PROJECT" \
      --rules="tcp:$VERIFIER_PORT" --source-tags="$players" || die "could not change the firewall rule"
  else
    create "firewall rule $NAME-verifier" gcloud compute firewall-rules create "$NAME-verifier" \
      --project="$PROJECT" --network="$NETWORK" --direction=INGRESS --action=allow \
      --rules="tcp:$VERIFIER_PORT" --source-tags="$players" --target-tags="$NAME-verifier"
  fi
}

delete() {
  delete_hosts "$GROUP"
  remove "firewall rule $NAME-verifier" gcloud compute firewall-rules describe "$NAME-verifier" \
    --project="$PROJECT" -- gcloud compute firewall-rules delete "$NAME-verifier" \
    --project="$PROJECT" --quiet
  remove "secret $SECRET" gcloud secrets describe "$SECRET" --project="$PROJECT" -- \
    gcloud secrets delete "$SECRET" --project="$PROJECT" --quiet
  remove "service account $VERIFIER_ACCOUNT" gcloud iam service-accounts describe \
    "$VERIFIER_ACCOUNT" --project="$PROJECT" -- gcloud iam service-accounts delete \
    "$VERIFIER_ACCOUNT" --project="$PROJECT" --quiet
}

begin "up urls start status logs stop delete" "$@"
GROUP=$NAME-verifier
[ "$COMMAND" = urls ] || check_project
case $COMMAND in
  up)
    check_bucket
    check_network
    make_account "$VERIFIER_ACCOUNT" "uirl_jax: verifiers"
    make_token
    grant_files
    open_firewall
    verifier_line
    upload_files "$GROUP" "$LINE"
    host_metadata "$GROUP" browser
    make_hosts "$GROUP" "$VERIFIER_HOSTS" --machine-type="$VERIFIER_MACHINE" --image-project=debian-cloud \
      --image-family=debian-12 --boot-disk-size=50GB --tags="$NAME-verifier" --service-account="$VERIFIER_ACCOUNT"
    ;;
  urls)
    verifier_urls
    echo "$VERIFIER_URLS"
    ;;
  start)
    verifier_line
    upload_files "$GROUP" "$LINE"
    on_hosts "$GROUP" "$VERIFIER_HOSTS" "sudo bash /opt/uirl/files/host_boot.sh"
    ;;
  status)
    list_hosts "$GROUP"
    on_hosts "$GROUP" "$VERIFIER_HOSTS" "sudo bash /opt/uirl/files/host.sh state"
    ;;
  logs) on_host "$GROUP" "$LOGS_OF" "sudo bash /opt/uirl/files/host.sh logs" ;;
  stop) on_hosts "$GROUP" "$VERIFIER_HOSTS" "sudo bash /opt/uirl/files/host.sh stop" ;;
  delete) delete ;;
esac
