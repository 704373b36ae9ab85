#!/usr/bin/env bash
# A run on Google Kubernetes Engine: a cluster with one node pool for each slice of the learner, one
# for actors and one for verifiers. Values: launch/env.
#
#     launch/gke/cluster.sh [--dry-run] COMMAND
#
#     up       cluster, node pools, JobSet's controller, access to the bucket, the verifiers' token
#     image    builds IMAGE with docker and pushes it
#     start    the pods of learner, actors and, with VERIFIERS=pool, verifiers
#     status | logs
#     stop     the pods; the nodes go on costing
#     delete   the cluster
set -euo pipefail
cd "$(dirname "$0")/../.."
. launch/cloud.sh

kube() { run kubectl --context="gke_${PROJECT}_${ZONE}_$CLUSTER" "$@"; }

# render FILE: with values in place of names as $NAME; a name without a value is refused.
render() {
  env PROJECT="$PROJECT" NAME="$NAME" RUN_ACCOUNT="$RUN_ACCOUNT" IMAGE="$IMAGE" ACTOR_IMAGE="$ACTOR_IMAGE" \
    JOBSET_RESTARTS="$JOBSET_RESTARTS" SLICES="$SLICES" VMS="$VMS" CHIPS_PER_VM=$((CHIPS / VMS)) \
    TOPOLOGY="$TOPOLOGY" GKE_ACCELERATOR="$GKE_ACCELERATOR" ACTOR_HOSTS="$ACTOR_HOSTS" \
    VERIFIER_HOSTS="$VERIFIER_HOSTS" VERIFIER_PORT="$VERIFIER_PORT" VERIFIER_BROWSERS="$VERIFIER_BROWSERS" \
    LEARNER_LINE="$LEARNER_LINE" ACTOR_LINE="$ACTOR_LINE" python3 -c '
import os, string, sys
print(string.Template(open(sys.argv[1]).read()).substitute(os.environ), end="")' "$1"
}

# apply FILE: in a dry run the manifest is printed.
apply() {
  local manifest
  manifest=$(render "launch/gke/$1") || die "launch/gke/$1: could not be filled in"
  printf '# launch/gke/%s, filled in:\n' "$1" >&3
  [ "$DRY_RUN" = no ] || printf '%s\n' "$manifest" >&3
  # No pipe: a dry run reads nothing, and a writer without a reader would fail.
  kube apply --filename=- <<<"$manifest" || die "could not apply launch/gke/$1"
}

lines() {
  PROGRAM=uirl-jax
  VERIFIER_DOMAIN=$NAME-verifier.$NAME.svc.cluster.local
  [ ! -f "${CONFIG%%:*}" ] || die "CONFIG=$CONFIG: pods read shipped configs only; build yours into IMAGE, and name it by its path there"
  learner_line
  LEARNER_LINE=$LINE
  actor_line
  ACTOR_LINE=$LINE
}

check() {
  find_slice
  [ "$PROVISIONING" != reserved ] || die "PROVISIONING=reserved: create the node pools by hand, with --reservation; on-demand and spot are made here"
  # So would be what a learner plays to evaluate.
  [ "$VERIFIERS" != pool ] || [[ ! " $FLAGS" =~ \ --config\.evaluation\.every=0*[1-9] ]] ||
    die "FLAGS: evaluation.every: on Kubernetes no rule can let the learner into the verifiers; run --role=eval in the pod of an actor"
  [ "$ROLE" = learner ] || die "ROLE=$ROLE: on Kubernetes the learner's pods use the hosts' network, which no rule can let into the verifiers; use ROLE=learner with ACTOR_HOSTS"
}

# node_pool NAME FLAG...
node_pool() {
  local pool=$1
  shift
  exists "node pool $pool" gcloud container node-pools describe "$pool" --cluster="$CLUSTER" \
    --project="$PROJECT" --zone="$ZONE" --format='value(status)' ||
    create "node pool $pool" gcloud container node-pools create "$pool" --cluster="$CLUSTER" \
      --project="$PROJECT" --zone="$ZONE" --workload-metadata=GKE_METADATA \
      --scopes=https://www.googleapis.com/auth/cloud-platform "$@"
}

# Pods in the network of their hosts have the hosts' account, not that of their ServiceAccount.
grant_hosts() {
  local role
  for role in roles/container.defaultNodeServiceAccount roles/artifactregistry.reader; do
    grant gcloud projects add-iam-policy-binding "$PROJECT" --condition=None \
      --member="serviceAccount:$RUN_ACCOUNT" --role="$role"
  done
}

up() {
  local index spot=() topology=()
  check_bucket
  check_network
  run gcloud services enable container.googleapis.com --project="$PROJECT" || die "could not enable the service"
  # Dataplane V2 is what keeps to a NetworkPolicy.
  exists "cluster $CLUSTER" gcloud container clusters describe "$CLUSTER" --project="$PROJECT" \
    --zone="$ZONE" --format='value(status)' ||
    create "cluster $CLUSTER" gcloud container clusters create "$CLUSTER" --project="$PROJECT" \
      --zone="$ZONE" --network="$NETWORK" --subnetwork="$NETWORK" --enable-ip-alias \
      --enable-private-nodes --enable-dataplane-v2 --workload-pool="$PROJECT.svc.id.goog" \
      --machine-type=e2-standard-4 --num-nodes=1
  [ "$PROVISIONING" != spot ] || spot=(--spot)
  [ "$VMS" -eq 1 ] || topology=(--tpu-topology="$TOPOLOGY")
  grant_hosts
  for ((index = 0; index < SLICES; index++)); do
    node_pool "slice-$index" --machine-type="$GKE_MACHINE" --num-nodes="$VMS" \
      --service-account="$RUN_ACCOUNT" \
      ${topology[@]+"${topology[@]}"} ${spot[@]+"${spot[@]}"}
  done
  spot=()
  [ "$ACTOR_PROVISIONING" != spot ] || spot=(--spot)
  [ "$ACTOR_HOSTS" -eq 0 ] || node_pool actors --machine-type="$ACTOR_MACHINE" --num-nodes="$ACTOR_HOSTS" \
    --accelerator="type=$ACTOR_GPU,count=1,gpu-driver-version=latest" --node-labels=uirl-role=actor \
    ${spot[@]+"${spot[@]}"}
  [ "$VERIFIERS" != pool ] || node_pool verifiers --machine-type="$VERIFIER_MACHINE" \
    --num-nodes="$VERIFIER_HOSTS" --node-labels=uirl-role=verifier
  run gcloud container clusters get-credentials "$CLUSTER" --project="$PROJECT" --zone="$ZONE" ||
    die "no access to cluster $CLUSTER"
  kube apply --server-side --filename="https://github.com/kubernetes-sigs/jobset/releases/download/$JOBSET_VERSION/manifests.yaml" ||
    die "could not install JobSet $JOBSET_VERSION"
  apply base.yaml
  grant gcloud iam service-accounts add-iam-policy-binding "$RUN_ACCOUNT" --project="$PROJECT" \
    --role=roles/iam.workloadIdentityUser --member="serviceAccount:$PROJECT.svc.id.goog[$NAME/$NAME]"
  [ "$VERIFIERS" != pool ] || make_token
}

# The token goes from openssl to the cluster: on no disk and in no command line.
make_token() {
  exists "secret $SECRET" kubectl --context="gke_${PROJECT}_${ZONE}_$CLUSTER" get secret "$SECRET" \
    --namespace="$NAME" --output=name && return
  MADE+=("secret $SECRET")
  show openssl rand -hex 32 '|' kubectl create secret generic "$SECRET" --from-file=verifier_token=/dev/stdin
  [ "$DRY_RUN" = yes ] ||
    openssl rand -hex 32 | tr -d '\n' | kube create secret generic "$SECRET" --namespace="$NAME" \
      --from-file=verifier_token=/dev/stdin || die "could not store the token"
}

# pin NAME: puts the digest that a tag has by now into the variable NAME, an image. So pods change
# with their code, and all pods of a run have the same.
pin() {
  [[ ${!1} == *-docker.pkg.dev/* && ${!1} != *@sha256:* ]] || return 0 # else as it is written
  exists "$1=${!1}" gcloud artifacts docker images describe "${!1}" --project="$PROJECT" \
    --format='value(image_summary.digest)' || [ "$DRY_RUN" = yes ] ||
    die "$1=${!1}: no such image; launch/gke/cluster.sh image pushes it"
  [ -z "$ANSWER" ] || printf -v "$1" %s "${!1%:*}@$ANSWER"
}

start() {
  pin IMAGE
  [ "$ACTOR_HOSTS" -eq 0 ] || pin ACTOR_IMAGE
  [ "$VERIFIERS" != pool ] || apply verifiers.yaml
  [ "$ACTOR_HOSTS" -eq 0 ] || apply actors.yaml
  end_changed_learner
  apply learner.yaml
}

# The jobs of a JobSet cannot be changed, and one that has ended is not started again.
end_changed_learner() {
  local state manifest code=0
  exists "jobset $NAME-learner" kubectl --context="gke_${PROJECT}_${ZONE}_$CLUSTER" get jobset \
    "$NAME-learner" --namespace="$NAME" --output=jsonpath='{.status.terminalState}' || return 0
  state=$ANSWER
  manifest=$(render launch/gke/learner.yaml) || die "launch/gke/learner.yaml: could not be filled in"
  show kubectl --context="gke_${PROJECT}_${ZONE}_$CLUSTER" diff --filename=-
  ask kubectl --context="gke_${PROJECT}_${ZONE}_$CLUSTER" diff --filename=- <<<"$manifest" || code=$?
  # 1: it differs. More: a change that is refused, or no answer, for which no run is ended.
  [ "$code" -le 1 ] || [[ $ERRORS == *immutable* ]] || die "jobset $NAME-learner: ${ERRORS//$'\n'/ }"
  [ -n "$state" ] || [ "$code" -ne 0 ] || return 0
  kube delete jobset "$NAME-learner" --namespace="$NAME" --wait || die "could not delete jobset $NAME-learner"
}

# build_image TAG EXTRA
build_image() {
  run docker build --file=launch/gke/Dockerfile --build-arg=WHEEL="$WHEEL" --build-arg=EXTRA="$2" \
    --tag="$1" . || die "could not build $1"
  run docker push "$1" || die "could not push $1"
}

image() {
  build_wheel
  build_image "$IMAGE" browser,tpu,gcs
  [ "$ACTOR_HOSTS" -eq 0 ] || build_image "$ACTOR_IMAGE" cuda
}

begin "up image start status logs stop delete" "$@"
check
lines
case $COMMAND in
  up)
    check_project
    up
    ;;
  image) image ;;
  start) start ;;
  status) kube get jobsets,statefulsets,pods --namespace="$NAME" ;;
  logs) kube logs --namespace="$NAME" --selector="app=$NAME-learner" --follow --prefix --max-log-requests=100 ;;
  stop) kube delete jobsets,statefulsets --all --namespace="$NAME" ;;
  delete)
    check_project
    remove "cluster $CLUSTER" gcloud container clusters describe "$CLUSTER" --project="$PROJECT" \
      --zone="$ZONE" --format='value(status)' -- gcloud container clusters delete "$CLUSTER" \
      --project="$PROJECT" --zone="$ZONE" --quiet
    ;;
esac
