#!/usr/bin/env bash
# From nothing to a trained grounder, on this machine: draws 10,000 screens in Chromium, makes sets
# of them, trains on the recorded clicks by a cold start and GRPO, and compares the models before,
# between and after on screens and on a component library that they never saw. Arguments go to the
# training, for example --config.seed=1 --workdir=runs/grounder1. The screens are drawn once; what
# is finished is not repeated. UIRL_SCREENS=1000 draws fewer, into a folder of their own.
set -euo pipefail
cd "$(dirname "$0")/.."

. launch/environment.sh
make_environment .venv
install_browser .venv
.venv/bin/python -c 'import pyarrow' 2>/dev/null ||
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[data]'

workdir=runs/grounder
arguments=()
for argument in "$@"; do
  case $argument in
    --workdir=*) workdir=${argument#*=} ;;
    *) arguments+=("$argument") ;;
  esac
done

screens=${UIRL_SCREENS:-10000}
data=runs/grounding-$screens
draw() { # NAME SPLIT SCREENS [FLAG]: screens of a split, then the set NAME of them
  [ -e "$data/$1" ] && return
  .venv/bin/python -m tools.make_grounding_data --out="$data/drawn-$1" --split="$2" --screens="$3" \
    "${@:4}"
  .venv/bin/python -m tools.prepare_gui_data "$data/drawn-$1" --kind=grounding \
    --validation_share=0.05 --noverl --out="$data/$1"
}
# Bulma alone: the other source of the split, MiniWoB++, has pages that the start was trained on. It
# comes first, since without npm or a network it ends here.
draw libraries test $((screens < 500 ? screens : 500)) --sources=bulma
draw screens train "$screens"

run=(.venv/bin/python -m uirl_jax.main --config="configs/grounder.py:$data" --workdir="$workdir")
"${run[@]}" "${arguments[@]}"
# base is what the cold start made of the start.
"${run[@]}" "${arguments[@]}" --role=eval --tasks=grounder \
  --checkpoint=uirl_jax/assets/miniwob-pages/start --checkpoint=base --checkpoint=policy
