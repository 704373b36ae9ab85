# shellcheck shell=bash disable=SC2034,SC2153 # names that the sourcing scripts and launch/env share
# Sourced by the scripts that call gcloud: the values, the dry run, what was made, checks of the
# project and its bucket, and the TPU slices that are known.
#
# A script changes the cloud through `create`, `remove` and `run` only, and reads it through
# `exists` and `read_cloud`. All print the command that they run; with --dry-run they only print
# it, and the cloud is taken to be empty.

exec 3>&1 # commands are printed here, also where the output of a function is caught
DRY_RUN=no
MADE=() # what this run made or may have made; named in the last line if the script fails

# begin USAGE "$@": reads the values and the arguments --dry-run and COMMAND.
begin() {
  local usage=$1 file
  shift
  [ $((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1])) -ge 404 ] ||
    die "bash $BASH_VERSION is too old, 4.4 is needed; macOS: brew install bash"
  if [ "${1:-}" = --dry-run ]; then
    DRY_RUN=yes
    shift
  fi
  COMMAND=${1:-}
  [ $# -eq 1 ] && [[ " $usage " == *" $COMMAND "* ]] ||
    die "usage: $0 [--dry-run] COMMAND, where COMMAND is one of: $usage"
  file=${UIRL_ENV:-launch/env}
  [ -f "$file" ] || die "$file: no such file; cp launch/env.example launch/env, and edit it"
  # shellcheck source=launch/env.example
  . "$file"
  check_values
  REGION=${ZONE%-*}
  WORKDIR=gs://$BUCKET/$RUN
  FILES=gs://$BUCKET/launch/$RUN # what the hosts of this run install and start
  RUN_ACCOUNT=$NAME-run@$PROJECT.iam.gserviceaccount.com
  VERIFIER_ACCOUNT=$NAME-verifier@$PROJECT.iam.gserviceaccount.com
  SECRET=$NAME-verifier-token
  VERIFIER_DOMAIN=$ZONE.c.$PROJECT.internal # of the hosts' internal names
  PROGRAM=/opt/uirl/venv/bin/uirl-jax
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP # the terminal was closed
}

check_values() {
  local word='^[a-z]([-a-z0-9]*[a-z0-9])?$' number='^[0-9]+$' name value
  [[ $PROJECT =~ $word ]] || die "PROJECT=$PROJECT: not the id of a project"
  [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$ ]] || die "ZONE=$ZONE: not a zone, such as us-east5-b"
  for name in NAME SLICE ACTOR_GROUP; do
    value=${!name}
    [[ $value =~ $word ]] && [ ${#value} -le 20 ] ||
      die "$name=${!name}: at most 20 lower-case letters, digits and hyphens, first a letter"
  done
  [[ $BUCKET =~ ^[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]$ ]] ||
    die "BUCKET=$BUCKET: not the name of a bucket; write it without gs://"
  [[ $RUN =~ ^[A-Za-z0-9_-]+$ ]] && [ "$RUN" != launch ] ||
    die "RUN=$RUN: letters, digits, _ and - only, and not the word launch"
  for name in SLICES POLL_S WAIT_S ACTOR_HOSTS ACTORS_PER_HOST ACTOR_FIRST VERIFIER_HOSTS \
    VERIFIER_PORT VERIFIER_BROWSERS SHARD_DAYS; do
    [[ ${!name} =~ $number ]] || die "$name=${!name}: not a number"
  done
  one_of PROVISIONING on-demand spot reserved
  one_of ACTOR_PROVISIONING on-demand spot
  one_of ROLE learner all actor
  [ -z "$VERIFIERS" ] || one_of VERIFIERS pool
}

# one_of NAME WORD...: whether the variable holds one of the words.
one_of() {
  local name=$1
  shift
  [[ " $* " == *" ${!name} "* ]] || die "$name=${!name}: one of: $*"
}

# ------------------------------------------------------------------------------------- commands

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# The last line of a script that failed names what it made: that may cost money.
finish() {
  local code=$? names
  if [ "$code" -ne 0 ] && [ ${#MADE[@]} -gt 0 ]; then
    printf -v names '; %s' "${MADE[@]}"
    printf 'left in project %s, and may cost money: %s. Run the same command again to go on, or "%s delete".\n' \
      "$PROJECT" "${names#; }" "$0" >&2
  fi
}

# quote WORD...: sets QUOTED, the words as a shell reads them, with quotes only where needed.
quote() {
  local word plain='^[A-Za-z0-9_@%+=:,./~-]+$'
  QUOTED=
  for word; do
    if ! [[ $word =~ $plain || $word == '|' ]]; then
      if [[ $word =~ ^(--?[a-z_.-]+=)(.*)$ ]]; then
        word=${BASH_REMATCH[1]}${BASH_REMATCH[2]@Q}
      else
        word=${word@Q}
      fi
    fi
    QUOTED+=${QUOTED:+ }$word
  done
}

# show WORD...: prints a command in lines of about 100 columns that can be pasted.
show() {
  local line='' word
  for word; do
    quote "$word"
    if [ -n "$line" ] && [ $((${#line} + ${#QUOTED})) -gt 96 ]; then
      printf '%s \\\n' "$line" >&3
      line="    $QUOTED"
    else
      line="$line${line:+ }$QUOTED"
    fi
  done
  printf '%s\n' "$line" >&3
}

run() {
  show "$@"
  [ "$DRY_RUN" = yes ] || "$@"
}

# ask COMMAND...: sets ANSWER to what the command prints, and ERRORS. Apart, because gcloud warns of
# an impersonated account or an old Python in every answer.
ask() {
  local file code=0
  file=$(mktemp)
  ANSWER=$("$@" 2>"$file") || code=$?
  ERRORS=$(<"$file")
  rm -f "$file"
  return "$code"
}

# read_cloud WHAT COMMAND...: sets ANSWER to what the command prints; empty in a dry run.
read_cloud() {
  local what=$1
  shift
  show "$@"
  ANSWER=
  [ "$DRY_RUN" = yes ] || ask "$@" || die "$what: ${ERRORS//$'\n'/ }"
}

# exists WHAT COMMAND...: whether the command that describes it finds it; other failures end the script.
exists() {
  local what=$1
  shift
  show "$@"
  ANSWER=
  [ "$DRY_RUN" = no ] || return 1
  ask "$@" && return 0
  case $ERRORS in
    *PERMISSION_DENIED* | *" 403"* | *"denied"*) ;; # these add "(or it may not exist)"
    *NOT_FOUND* | *NotFound* | *"not found"* | *"not exist"* | *"HTTPError 404"*) return 1 ;;
  esac
  die "$what: ${ERRORS//$'\n'/ }"
}

# create WHAT COMMAND...: named as made before it is called, since a call that fails may have made it.
create() {
  local what=$1
  shift
  MADE+=("$what")
  run "$@" || die "could not create $what"
}

# grant COMMAND...: again for a while, since a new service account is not known everywhere at once.
grant() {
  local attempt
  for attempt in 1 2 3 4 5; do
    run "$@" >/dev/null && return
    sleep "$((POLL_S < 5 ? POLL_S : 5))"
  done
  die "could not grant the role: $*"
}

# remove WHAT DESCRIBE... -- DELETE...: deletes what exists.
remove() {
  local what=$1 describe=()
  shift
  while [ "$1" != -- ]; do
    describe+=("$1")
    shift
  done
  shift
  if exists "$what" "${describe[@]}" || [ "$DRY_RUN" = yes ]; then
    MADE+=("$what")
    run "$@" || die "could not delete $what"
    forget "$what"
  fi
}

forget() {
  local kept=() name
  for name in ${MADE[@]+"${MADE[@]}"}; do
    [ "$name" = "$1" ] || kept+=("$name")
  done
  MADE=(${kept[@]+"${kept[@]}"})
}

# put_text URL TEXT: an object with this text.
put_text() {
  show printf '%s\n' "$2" '|' gcloud storage cp - "$1"
  [ "$DRY_RUN" = yes ] || printf '%s\n' "$2" | gcloud storage cp - "$1" || die "could not write $1"
}

# --------------------------------------------------------------------------------------- checks

check_project() {
  command -v gcloud >/dev/null || [ "$DRY_RUN" = yes ] ||
    die "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
  exists "PROJECT=$PROJECT" gcloud projects describe "$PROJECT" --format='value(projectNumber)' ||
    [ "$DRY_RUN" = yes ] ||
    die "PROJECT=$PROJECT: no such project, or this account has no role in it (gcloud auth list)"
}

# The bucket of the run is there, and in the hosts' region: traffic between regions is charged.
check_bucket() {
  exists "BUCKET=$BUCKET" gcloud storage buckets describe "gs://$BUCKET" --format='value(location)' ||
    [ "$DRY_RUN" = yes ] || die "BUCKET=$BUCKET: no such bucket; launch/bucket.sh up creates it"
  [ "$DRY_RUN" = yes ] || [ "${ANSWER,,}" = "$REGION" ] ||
    die "BUCKET=$BUCKET is in ${ANSWER,,}, ZONE=$ZONE in $REGION: every read between regions is charged; choose a zone of ${ANSWER,,} or another bucket"
}

check_network() {
  exists "NETWORK=$NETWORK" gcloud compute networks subnets describe "$NETWORK" \
    --project="$PROJECT" --region="$REGION" --format='value(name)' || [ "$DRY_RUN" = yes ] ||
    die "NETWORK=$NETWORK: no subnet of this name in $REGION; launch/network.sh up creates both"
}

# -------------------------------------------------------------------------------------- the run

# Sets WHEEL, and builds it where none is given.
build_wheel() {
  local version
  if [ -n "$WHEEL" ]; then
    [ -f "$WHEEL" ] || die "WHEEL=$WHEEL: no such file"
    return
  fi
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
  run "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir=dist . || die "could not build the wheel"
  WHEEL=dist/uirl_jax-$version-py3-none-any.whl
}

# upload_files GROUP COMMAND: the wheel, the host's scripts, a config of the user's own, and
# GROUP.command, the shell line that these hosts run.
upload_files() {
  local group=$1 line=$2 files
  build_wheel
  files=("$WHEEL" launch/host.sh launch/host_boot.sh)
  [ ! -f "${CONFIG%%:*}" ] || files+=("${CONFIG%%:*}") # what follows the colon is its argument
  run gcloud storage cp "${files[@]}" "$FILES/" || die "could not copy the files of the hosts to $FILES/"
  put_text "$FILES/wheel.name" "${WHEEL##*/}" # the folder may hold wheels of other versions
  put_text "$FILES/$group.command" "$line"
}

# Sets VERIFIER_URLS, as Python writes a tuple.
verifier_urls() {
  local index
  VERIFIER_URLS=
  for ((index = 0; index < VERIFIER_HOSTS; index++)); do
    VERIFIER_URLS+="\"http://$NAME-verifier-$index.$VERIFIER_DOMAIN:$VERIFIER_PORT\","
  done
  VERIFIER_URLS="($VERIFIER_URLS)"
}

# Sets RUN_FLAGS: what is equal on every host of the run.
run_flags() {
  local config=$CONFIG file=${CONFIG%%:*} words
  [ ! -f "$file" ] || config=/opt/uirl/files/${file##*/}${CONFIG#"$file"}
  RUN_FLAGS=(--config="$config" --workdir="$WORKDIR")
  [ -z "$MODEL" ] || RUN_FLAGS+=(--config.model.path="$MODEL")
  if [ "$VERIFIERS" = pool ]; then
    verifier_urls
    RUN_FLAGS+=(--config.verifier.urls="$VERIFIER_URLS" --config.verifier.token_file=/run/uirl/verifier_token)
  fi
  read -ra words <<<"$FLAGS"
  RUN_FLAGS+=(${words[@]+"${words[@]}"})
}

# Sets LINE: what every host of the learner runs, with ROLE=actor a slice of one VM.
learner_line() {
  run_flags
  local words=(exec "$PROGRAM" "${RUN_FLAGS[@]}" --role="$ROLE")
  if [ "$ROLE" = actor ]; then
    words+=(--actor="$ACTOR_FIRST" --actors="$ACTORS_PER_HOST" --cluster=none)
  else
    words+=(--config.cluster.preempted_exit_code=75) # 0 is then the end of the run
    [ "$SLICES" -eq 1 ] || words+=(--config.mesh.data="$SLICES" --config.mesh.fsdp=-1)
  fi
  quote "${words[@]}"
  LINE=$QUOTED
}

# Sets LINE: what every actor host runs; UIRL_INDEX is the number in its name.
actor_line() {
  run_flags
  quote exec "$PROGRAM" "${RUN_FLAGS[@]}"
  LINE="$QUOTED --role=actor"
  LINE+=" --actor=\$(($ACTOR_FIRST + UIRL_INDEX * $ACTORS_PER_HOST)) --actors=$ACTORS_PER_HOST --cluster=none"
}

# host_metadata GROUP EXTRAS: sets METADATA, what host_boot.sh and host.sh read on the host. Extras
# are joined by +: a comma would end the value.
host_metadata() {
  # The secret is named to all: a later `start` may send a command that needs it.
  METADATA=uirl-source=$FILES,uirl-group=$1,uirl-extra=$2,uirl-secret=$SECRET
}

# ------------------------------------------------------------------------------- groups of hosts

# make_account ACCOUNT PURPOSE
make_account() {
  exists "service account $1" gcloud iam service-accounts describe "$1" --project="$PROJECT" ||
    create "service account $1" gcloud iam service-accounts create "${1%%@*}" --project="$PROJECT" \
      --display-name="$2"
}

# make_hosts GROUP COUNT TEMPLATE_FLAG...: a managed instance group of hosts GROUP-0, GROUP-1, ...:
# the number in its name is the host's own, also when the group makes it again.
make_hosts() {
  local group=$1 count=$2 index
  shift 2
  exists "template $group" gcloud compute instance-templates describe "$group" --project="$PROJECT" ||
    create "template $group" gcloud compute instance-templates create "$group" --project="$PROJECT" \
      --region="$REGION" --subnet="$NETWORK" --no-address \
      --scopes=https://www.googleapis.com/auth/cloud-platform --metadata="$METADATA" \
      --metadata-from-file=startup-script=launch/host_boot.sh "$@"
  exists "group $group" gcloud compute instance-groups managed describe "$group" \
    --project="$PROJECT" --zone="$ZONE" ||
    create "group $group" gcloud compute instance-groups managed create "$group" \
      --project="$PROJECT" --zone="$ZONE" --template="$group" --base-instance-name="$group" --size=0
  for ((index = 0; index < count; index++)); do
    exists "host $group-$index" gcloud compute instances describe "$group-$index" \
      --project="$PROJECT" --zone="$ZONE" --format='value(status)' ||
      create "host $group-$index" gcloud compute instance-groups managed create-instance "$group" \
        --project="$PROJECT" --zone="$ZONE" --instance="$group-$index"
  done
}

# delete_hosts GROUP: with its hosts and its template.
delete_hosts() {
  local group=$1
  remove "group $group" gcloud compute instance-groups managed describe "$group" \
    --project="$PROJECT" --zone="$ZONE" -- gcloud compute instance-groups managed delete "$group" \
    --project="$PROJECT" --zone="$ZONE" --quiet
  remove "template $group" gcloud compute instance-templates describe "$group" \
    --project="$PROJECT" -- gcloud compute instance-templates delete "$group" --project="$PROJECT" --quiet
}

list_hosts() {
  run gcloud compute instance-groups managed list-instances "$1" --project="$PROJECT" --zone="$ZONE"
}

# on_host GROUP INDEX COMMAND: over ssh, through IAP: the hosts have no public address.
on_host() {
  run gcloud compute ssh "$1-$2" --project="$PROJECT" --zone="$ZONE" --tunnel-through-iap \
    --quiet --command="$3"
}

# on_hosts GROUP COUNT COMMAND: one after the other; goes on where one fails, and says which.
on_hosts() {
  local index failed=''
  for ((index = 0; index < $2; index++)); do
    on_host "$1" "$index" "$3" || failed+=" $1-$index"
  done
  [ -z "$failed" ] || die "failed on$failed"
}

# --------------------------------------------------------------------------- slices of the cloud

# Accelerator, its name in the TPU API, topology, chips, VMs. v5p counts two cores a chip.
slices() {
  cat <<'TABLE'
v5e-1 v5litepod-1 1x1 1 1
v5e-4 v5litepod-4 2x2 4 1
v5e-8 v5litepod-8 2x4 8 1
v5e-16 v5litepod-16 4x4 16 4
v5e-32 v5litepod-32 4x8 32 8
v5e-64 v5litepod-64 8x8 64 16
v5e-128 v5litepod-128 8x16 128 32
v5e-256 v5litepod-256 16x16 256 64
v5p-8 v5p-8 2x2x1 4 1
v5p-16 v5p-16 2x2x2 8 2
v5p-32 v5p-32 2x2x4 16 4
v5p-64 v5p-64 2x4x4 32 8
v5p-128 v5p-128 4x4x4 64 16
v5p-256 v5p-256 4x4x8 128 32
v6e-1 v6e-1 1x1 1 1
v6e-4 v6e-4 2x2 4 1
v6e-8 v6e-8 2x4 8 1
v6e-16 v6e-16 4x4 16 4
v6e-32 v6e-32 4x8 32 8
v6e-64 v6e-64 8x8 64 16
v6e-128 v6e-128 8x16 128 32
v6e-256 v6e-256 16x16 256 64
TABLE
}

# Sets ACCELERATOR_TYPE, TOPOLOGY, CHIPS, VMS, RUNTIME_VERSION, GKE_ACCELERATOR, GKE_MACHINE.
find_slice() {
  local name api topology chips vms found=no
  while read -r name api topology chips vms; do
    case $ACCELERATOR in
      "$name" | "$api" | "${name%-*}:$topology")
        ACCELERATOR_TYPE=$api TOPOLOGY=$topology CHIPS=$chips VMS=$vms found=yes
        ;;
    esac
  done < <(slices)
  [ $found = yes ] || die "ACCELERATOR=$ACCELERATOR: not known; known are$(slices | while read -r name _ topology _; do printf ' %s (%s)' "$name" "${name%-*}:$topology"; done)"
  case $ACCELERATOR_TYPE in
    v5litepod-*) set -- v2-alpha-tpuv5-lite tpu-v5-lite-podslice ct5lp-hightpu ;;
    v5p-*) set -- v2-alpha-tpuv5 tpu-v5p-slice ct5p-hightpu ;;
    v6e-*) set -- v2-alpha-tpuv6e tpu-v6e-slice ct6e-standard ;;
  esac
  RUNTIME_VERSION=${RUNTIME_VERSION:-$1} GKE_ACCELERATOR=$2 GKE_MACHINE=$3-$((CHIPS / VMS))t
}
