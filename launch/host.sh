#!/usr/bin/env bash
# Runs on a host in the cloud, as root: installs the wheel and runs the host's command as the systemd
# unit `uirl`. host_boot.sh calls it at every boot, launch/*.sh over ssh.
#
#     host.sh boot        install what changed, start or restart the unit; nothing where nothing changed
#     host.sh versions    one line: Python, JAX, libtpu and the wheel, equal on all hosts of a slice
#     host.sh state       one line: starting, running, restarting, ended, failed with its exit code
#     host.sh stop | logs
#
# The unit starts the command again after every exit but 0 (the run has ended) and 1 (a mistake of
# the user's): 75 asks for it, and JAX aborts when another host is lost.
set -euo pipefail

HOME_DIR=/opt/uirl
FILES=$HOME_DIR/files
VENV=$HOME_DIR/venv
UNIT=/etc/systemd/system/uirl.service
TOKEN=/run/uirl/verifier_token

metadata() {
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1" || true
}

# uirl_jax needs Python 3.11; the images of TPU VMs are Ubuntu 22.04, which has 3.10.
make_environment() {
  local python
  "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return # half of one has no pip
  for python in python3.13 python3.12 python3.11 python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$python" -m venv --clear "$VENV"
      return
    fi
  done
  curl -LsSf https://astral.sh/uv/install.sh | env UV_UNMANAGED_INSTALL=$HOME_DIR/uv sh
  UV_PYTHON_INSTALL_DIR=$HOME_DIR/python $HOME_DIR/uv/uv venv --clear --seed --python=3.12 "$VENV"
}

# install EXTRAS: the wheel with its dependencies. A wheel of the same version may hold other code.
install() {
  local wheel sum extras=${1//+/,}
  wheel=$FILES/$(cat "$FILES/wheel.name")
  sum="$(sha256sum <"$wheel" | cut -c1-16) $1"
  [ "$(cat $HOME_DIR/installed 2>/dev/null)" != "$sum" ] || return 0
  make_environment
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel${extras:+[$extras]}"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
  echo "$sum" >$HOME_DIR/installed
}

install_browser() {
  [ -x /usr/lib/chromium/chromium-headless-shell ] && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv chromium-headless-shell \
    fonts-liberation fonts-dejavu-core
}

# fetch_token GROUP: the verifiers' token, from Secret Manager to memory: never on a disk or in a
# command line. Only where the command reads it: others may not have the secret.
fetch_token() {
  local secret
  grep -qF "$TOKEN" "$FILES/$1.command" || return 0
  secret=$(metadata uirl-secret)
  [ -n "$secret" ] || {
    echo "error: the command needs the verifiers' token, and this host's metadata has no uirl-secret: delete the host's slice or group, and create it again" >&2
    exit 1
  }
  mkdir -p ${TOKEN%/*}
  (umask 077 && gcloud secrets versions access latest --secret="$secret" >$TOKEN)
  chown -R uirl ${TOKEN%/*}
}

# A TPU belongs to root on some images; memory is locked for its DMA; pages of 2 MiB start it faster.
unit() {
  cat <<UNIT
[Unit]
Description=uirl_jax $1
StartLimitIntervalSec=0

[Service]
User=uirl
WorkingDirectory=$HOME_DIR/work
Environment=UIRL_INDEX=$2
ExecStartPre=+/bin/sh -c 'for device in /dev/accel* /dev/vfio/*; do [ ! -e "\$device" ] || chown uirl "\$device"; done; echo always >/sys/kernel/mm/transparent_hugepage/enabled'
ExecStart=/bin/bash $FILES/$1.command
Restart=on-failure
RestartPreventExitStatus=1
RestartSec=10
TimeoutStopSec=90
KillMode=mixed
LimitMEMLOCK=infinity
LimitNOFILE=1048576
UNIT
}

boot() {
  local group extra index content config
  group=$(metadata uirl-group)
  extra=$(metadata uirl-extra)
  index=$(hostname -s | sed -n 's/.*-\([0-9]*\)$/\1/p')
  id uirl >/dev/null 2>&1 || useradd --system --create-home --home-dir $HOME_DIR/work uirl
  mkdir -p $HOME_DIR/work
  [ "$extra" != browser ] || install_browser
  install "$extra"
  fetch_token "$group"
  content=$(unit "$group" "${index:-0}")
  # What the command reads once, at its start.
  content+=$'\n'"# $({
    cat "$FILES/$group.command" $HOME_DIR/installed
    for config in "$FILES"/*.py; do # of the user's own
      ! grep -qF "$config" "$FILES/$group.command" || cat "$config"
    done
    [ ! -f $TOKEN ] || cat $TOKEN
  } | sha256sum)"
  if [ "$content" = "$(cat $UNIT 2>/dev/null)" ] && systemctl is-active --quiet uirl; then
    echo "already running: $group"
    return
  fi
  echo "$content" >$UNIT
  systemctl daemon-reload
  systemctl restart uirl
  echo "started: $group"
}

versions() {
  "$VENV/bin/python" - "$(cut -d' ' -f1 $HOME_DIR/installed)" <<'PYTHON'
import importlib.metadata, platform, sys
found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
try:
    found["libtpu"] = importlib.metadata.version("libtpu")
except importlib.metadata.PackageNotFoundError:
    found["libtpu"] = "none"
words = " ".join(f"{name}={version}" for name, version in found.items())
print(f"uirl-versions host={platform.node()} python={platform.python_version()} {words} wheel={sys.argv[1]}")
PYTHON
}

state() {
  local active code ended
  active=$(systemctl show uirl --property=ActiveState --value)
  ended=$(systemctl show uirl --property=ExecMainExitTimestamp --value)
  code=$(systemctl show uirl --property=ExecMainStatus --value)
  case $active/$code in
    active/*) active=running ;;
    activating/*) active=restarting ;;
    inactive/0) active=${ended:+ended} ;; # else not started since the host did: its files are copied
    inactive/*) active=stopped ;;
    failed/1) active=failed ;;
    failed/*) active=stopped ;; # a learner that is stopped leaves with 75
  esac
  [ -f $UNIT ] || active=missing
  echo "uirl-state host=$(hostname -s) state=${active:-starting} code=$code"
}

main() {
  case ${1:-} in
    boot)
      mkdir -p $HOME_DIR
      exec 9>$HOME_DIR/lock
      flock 9 # the startup script and a command over ssh may come at once
      boot
      ;;
    versions | state) "$1" ;;
    stop) systemctl stop uirl ;;
    logs) exec journalctl --unit=uirl --lines=50 --follow ;;
    *)
      echo "usage: host.sh boot | versions | state | stop | logs" >&2
      exit 1
      ;;
  esac
}
main "$@"
