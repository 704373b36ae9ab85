#!/bin/bash
# Stands in for gcloud, kubectl and docker in the tests of launch/, under each of these names: records
# every call in $FAKE_CLOUD/calls, keeps what exists as files in $FAKE_CLOUD/state, and fails where it
# is told to.
#
#     FAIL_AT, FAIL_HOW   number of the call that fails; before or after it had its effect
#     FAIL_TEXT           what the failing call says
#     FAIL_GROUP          group of which every call fails
#     ABSENT              group of which nothing exists ("projects")
#     LOCATION            of the bucket
#     $FAKE_CLOUD/slice_states, run_states, versions    answers, one a line; the last one stays
#     WARNING             what every call of gcloud says before it answers
#     DIFF_SAYS           why kubectl diff fails
#     DIGEST              of an image in Artifact Registry
#     $FAKE_CLOUD/jobset  the manifest that was applied; jobset_state: its terminal state
set -eu

read -r number <"$FAKE_CLOUD/count"
number=$((number + 1))
echo $number >"$FAKE_CLOUD/count"
tool=${0##*/}
printf -v padded %04d $number
printf '%s\0' "$tool" "$@" >"$FAKE_CLOUD/calls/$padded"

[ "$tool" != gcloud ] || [ -z "${WARNING:-}" ] || echo "WARNING: $WARNING" >&2

words=() instance='' reads=no command=''
for argument; do
  case $argument in
    --instance=*) instance=${argument#*=} ;;
    --command=*) command=${argument#*=} ;;
    --data-file=- | --filename=- | *=/dev/stdin) reads=yes ;;
    --*) ;;
    -) reads=yes ;;
    *) words+=("$argument") ;;
  esac
done
[ $reads = no ] || cat >"$FAKE_CLOUD/stdin/$padded"

group='' verb='' name=''
for word in "${words[@]}"; do
  if [ -n "$verb" ]; then
    name=$word
    break
  fi
  case $word in
    describe | create | delete | update | list | list-instances | create-instance | describe-from-family | \
      cp | rm | enable | ssh | scp | add | add-iam-policy-binding | get-credentials | apply | diff | get | logs | \
      build | push) verb=$word ;;
    *) group+=${group:+ }$word ;;
  esac
done
[ "$tool" = gcloud ] || group=$tool
case "$group $verb" in
  "storage rm") group="storage buckets" verb=delete ;;
  "iam service-accounts "*) name=${name%%@*} ;;
  "kubectl get" | "kubectl create") name=${words[-1]} ;; # get secret NAME, create secret generic NAME
esac
# file GROUP NAME: sets `path`. As `made`, without a process of its own: tests make thousands of calls.
file() { path="$FAKE_CLOUD/state/${1// /_}=${2//\//%}"; }
made() { : >>"$1"; }
file "$group" "$name"
record=$path

# next NAME: the first line of a file of answers, which is dropped unless it is the last.
next() {
  local answers=$FAKE_CLOUD/$1
  [ -s "$answers" ] || return 0
  head -n 1 "$answers"
  [ "$(wc -l <"$answers")" -le 1 ] || sed -i 1d "$answers"
}

fail() {
  echo "ERROR: (gcloud) $*" >&2
  exit 1
}

effect() {
  local jobset=$FAKE_CLOUD/jobset
  case "$tool $verb $name" in
    "kubectl delete jobset") rm "$jobset" "${jobset}_state" 2>/dev/null || true ;;
    "kubectl apply "*)
      if grep -q "^kind: JobSet" "$FAKE_CLOUD/stdin/$padded" 2>/dev/null; then
        if [ -e "$jobset" ] && ! cmp -s "$jobset" "$FAKE_CLOUD/stdin/$padded"; then
          fail "spec.replicatedJobs: Invalid value: field is immutable"
        fi
        cp "$FAKE_CLOUD/stdin/$padded" "$jobset"
      fi
      ;;
    "kubectl diff "*)
      [ -z "${DIFF_SAYS:-}" ] || { echo "$DIFF_SAYS" >&2 && exit 2; }
      cmp -s "$jobset" "$FAKE_CLOUD/stdin/$padded" || exit 1
      ;;
  esac
  case $verb in
    create)
      [ ! -e "$record" ] || fail "ALREADY_EXISTS: $name"
      made "$record"
      ;;
    create-instance) file "compute instances" "$instance" && made "$path" ;;
    add) made "$record" ;;
    delete)
      [ "$tool" = gcloud ] || return 0
      [ -e "$record" ] || fail "NOT_FOUND: $name was not found"
      rm "$record"
      case $group in
        "compute instance-groups managed") file "compute instances" "$name-" && rm -f "$path"* ;;
        "container clusters") file "container node-pools" "" && rm -f "$path"* ;;
      esac
      ;;
  esac
}

answer() {
  case "$group $verb" in
    "projects describe" | "compute tpus accelerator-types describe" | "compute images describe-from-family")
      echo "$name"
      return
      ;;
    "secrets versions list") [ ! -e "$record" ] || echo 1 ;;
    "compute tpus queued-resources describe")
      [ -e "$record" ] || fail "NOT_FOUND: $name was not found"
      case "$*" in
        *failedData*) echo "no capacity in this zone" ;;
        *) next slice_states ;;
      esac
      ;;
    "storage buckets describe")
      [ -e "$record" ] || fail "gs://... not found: 404"
      echo "${LOCATION:-US-EAST5}"
      ;;
    "artifacts docker images describe") echo "${DIGEST:-sha256:0123}" ;;
    "kubectl get")
      if [[ $* == *" jobset "* ]]; then
        [ -e "$FAKE_CLOUD/jobset" ] || fail "NotFound: $name"
        cat "$FAKE_CLOUD/jobset_state" 2>/dev/null || true
        return
      fi
      [[ $* != *" secret "* || -e $record ]] || fail "NotFound: $name"
      ;;
    *" describe")
      [ -e "$record" ] || fail "NOT_FOUND: $name was not found"
      echo "$name"
      ;;
    *" ssh")
      case $command in
        *"host.sh versions"*) tr ';' '\n' <<<"$(next versions)" ;;
        *"host.sh state"*) tr ';' '\n' <<<"$(next run_states)" ;;
      esac
      ;;
  esac
}

fails=no
[ "${FAIL_AT:-0}" -ne $number ] && [ "${FAIL_GROUP:-}" != "$group" ] || fails=yes
[ $fails = no ] || [ "${FAIL_HOW:-before}" = after ] || fail "${FAIL_TEXT:-injected failure}"
[ "${ABSENT:-}" != "$group" ] || fail "NOT_FOUND: $name was not found"
effect
[ $fails = no ] || fail "${FAIL_TEXT:-injected failure}"
answer "$@"
