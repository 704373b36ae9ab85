# shellcheck shell=bash
# Sourced by launch/local.sh and tests/run.sh: creates a virtual environment once, and updates it
# only when requirements.txt or pyproject.toml changes.

# make_environment DIR [test]
make_environment() {
  local dir=$1 extra=${2:-} python stamp wanted
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "uirl_jax needs Python 3.11 or newer, $python is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2
    return 1
  }
  stamp="$dir/.installed${extra:+-$extra}"
  wanted=$(cat requirements.txt pyproject.toml | cksum)
  if [ -x "$dir/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  echo "installing into $dir (once, a few minutes)"
  # An environment without pip is what a Python without ensurepip leaves, or an interruption.
  if ! "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$dir" || {
      echo "could not create a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
      return 1
    }
  fi
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
  if [ "$extra" = test ]; then
    # torch first and by exact version: otherwise another package may install a CUDA build of it.
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[test]'
  fi
  printf '%s\n' "$wanted" >"$stamp"
}

# install_libtpu DIR: the TPU's compiler, for the tests marked `tpu_aot`; needs no TPU, 200 MB. The
# version is the one that jax[tpu] names: jaxlib 0.10.2 cannot read libtpu 0.0.51's programs for v6e.
install_libtpu() {
  local dir=$1
  "$dir/bin/python" -c 'import libtpu' 2>/dev/null && return 0
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "libtpu==0.0.42.*" || {
    echo "could not install libtpu; tests marked tpu_aot will be skipped" >&2
  }
}

# install_browser DIR: Debian's Chromium with fonts, and the extra `browser`, for the tests marked
# `browser`. Without them these tests are skipped.
install_browser() {
  local dir=$1
  [ -x /usr/lib/chromium/chromium-headless-shell ] ||
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq chromium-headless-shell fonts-liberation fonts-dejavu-core) >/dev/null || {
    echo "could not install chromium-headless-shell with apt-get; tests marked browser will be skipped" >&2
  }
  "$dir/bin/python" -c 'import miniwob' 2>/dev/null ||
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[browser]' || {
    echo "could not install the extra browser; tests marked browser will be skipped" >&2
  }
}
