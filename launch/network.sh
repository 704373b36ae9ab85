#!/usr/bin/env bash
# What the hosts of a project share: the services of Google Cloud that are used, a network whose
# hosts have no public address, their way out to package indexes, and ssh through IAP alone.
#
#     launch/network.sh [--dry-run] up | delete
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/cloud.sh

up() {
  run gcloud services enable compute.googleapis.com tpu.googleapis.com storage.googleapis.com \
    iap.googleapis.com secretmanager.googleapis.com --project="$PROJECT" ||
    die "could not enable the services; the role roles/serviceusage.serviceUsageAdmin is needed"
  # TPU slices exchange more with large packets.
  exists "network $NETWORK" gcloud compute networks describe "$NETWORK" --project="$PROJECT" ||
    create "network $NETWORK" gcloud compute networks create "$NETWORK" --project="$PROJECT" \
      --subnet-mode=custom --mtu=8896
  # Google's own services, as the bucket, are reached without a public address.
  exists "subnet $NETWORK" gcloud compute networks subnets describe "$NETWORK" \
    --project="$PROJECT" --region="$REGION" ||
    create "subnet $NETWORK" gcloud compute networks subnets create "$NETWORK" \
      --project="$PROJECT" --region="$REGION" --network="$NETWORK" --range=10.128.0.0/20 \
      --enable-private-ip-google-access
  exists "router $NETWORK" gcloud compute routers describe "$NETWORK" \
    --project="$PROJECT" --region="$REGION" ||
    create "router $NETWORK" gcloud compute routers create "$NETWORK" \
      --project="$PROJECT" --region="$REGION" --network="$NETWORK"
  exists "NAT $NETWORK" gcloud compute routers nats describe "$NETWORK" --router="$NETWORK" \
    --project="$PROJECT" --region="$REGION" ||
    create "NAT $NETWORK" gcloud compute routers nats create "$NETWORK" --router="$NETWORK" \
      --project="$PROJECT" --region="$REGION" --auto-allocate-nat-external-ips \
      --nat-all-subnet-ip-ranges
  # The range is that of IAP's proxies.
  exists "firewall rule $NETWORK-ssh" gcloud compute firewall-rules describe "$NETWORK-ssh" \
    --project="$PROJECT" ||
    create "firewall rule $NETWORK-ssh" gcloud compute firewall-rules create "$NETWORK-ssh" \
      --project="$PROJECT" --network="$NETWORK" --direction=INGRESS --action=allow --rules=tcp:22 \
      --source-ranges=35.235.240.0/20
  # Workers of a slice and slices of a learner: JAX's coordinator, and gradients between slices.
  exists "firewall rule $NETWORK-learner" gcloud compute firewall-rules describe \
    "$NETWORK-learner" --project="$PROJECT" ||
    create "firewall rule $NETWORK-learner" gcloud compute firewall-rules create \
      "$NETWORK-learner" --project="$PROJECT" --network="$NETWORK" --direction=INGRESS \
      --action=allow --rules=tcp,udp,icmp --source-tags="$NAME-learner" --target-tags="$NAME-learner"
}

delete() {
  local rule
  for rule in "$NETWORK-learner" "$NETWORK-ssh"; do
    remove "firewall rule $rule" gcloud compute firewall-rules describe "$rule" --project="$PROJECT" -- \
      gcloud compute firewall-rules delete "$rule" --project="$PROJECT" --quiet
  done
  remove "NAT $NETWORK" gcloud compute routers nats describe "$NETWORK" --router="$NETWORK" \
    --project="$PROJECT" --region="$REGION" -- gcloud compute routers nats delete "$NETWORK" \
    --router="$NETWORK" --project="$PROJECT" --region="$REGION" --quiet
  remove "router $NETWORK" gcloud compute routers describe "$NETWORK" --project="$PROJECT" \
    --region="$REGION" -- gcloud compute routers delete "$NETWORK" --project="$PROJECT" \
    --region="$REGION" --quiet
  remove "subnet $NETWORK" gcloud compute networks subnets describe "$NETWORK" \
    --project="$PROJECT" --region="$REGION" -- gcloud compute networks subnets delete "$NETWORK" \
    --project="$PROJECT" --region="$REGION" --quiet
  remove "network $NETWORK" gcloud compute networks describe "$NETWORK" --project="$PROJECT" -- \
    gcloud compute networks delete "$NETWORK" --project="$PROJECT" --quiet
}

begin "up delete" "$@"
check_project
"$COMMAND"
