#!/usr/bin/env bash
# The startup script of every host in the cloud: copies the run's files from the bucket and hands
# over to host.sh. Runs as root at every boot, and again when launch/*.sh start runs it.
set -euo pipefail

metadata() {
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

main() { # a function, so that bash has read the file before a copy replaces it
  local source attempt
  source=$(metadata uirl-source)
  mkdir -p /opt/uirl/files
  for attempt in $(seq 30); do # the network and gcloud may not be ready at boot
    gcloud storage cp "$source/*" /opt/uirl/files/ && exec bash /opt/uirl/files/host.sh boot
    echo "attempt=$attempt of 30: could not copy $source" >&2
    sleep 10
  done
  echo "error: could not copy $source: check the bucket, and the roles of this host's service account" >&2
  exit 1
}
main
