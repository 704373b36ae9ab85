"""Does a run fit a machine, and how fast could it be? Asked of the TPU's compiler, without a TPU.

    python -m tools.plan --config=configs/grpo_qwen2vl_2b.py --topology=v5e:2x4
    python -m tools.plan --config=... --topology=v6e:2x4 --search --json=plan.json
    python -m tools.plan --config=... --topology=2xv5e:4x4 --config.mesh.data=2
    python -m tools.plan --config=... --topology=gpu:8xH100

Needs the `libtpu` wheel (pip install 'jax[tpu]'), no TPU and no weights: the learner's `score` and
gradients and the engine's programs are compiled for the slice on this host, some minutes
each. model.path may be a directory with nothing but a config.json, be named like a published
model, or be an hf:// name, whose weights are not downloaded. Times are bounds: all of a program's
FLOPs, HBM bytes and interconnect bytes at the chip's published rates, the three of them overlapping
perfectly. GPU machines are planned by formula.
"""

import os
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: the TPU is only compiled for

import jax
from absl import app, flags

from tools import command_line
from tools.planner import machines, plans, programs, report
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError
from uirl_jax.run import completed

# ------------------------------------------------------------------------------------ the command

_CONFIG = reading.define_config_file(
    RunConfig, help="an experiment, e.g. configs/grpo_qwen2vl_2b.py"
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "v5e:2x4, v5p:2x2x1, 2xv6e:4x4, gpu:8xH100, ...")
_SEARCH = flags.DEFINE_bool("search", False, "also try rows, remat and meshes")
_MOST = flags.DEFINE_integer("search_compiles", 4, "candidates to compile", lower_bound=1)
_SAMPLING = flags.DEFINE_bool("sampling", True, "also compile the engine's programs")
_JSON = flags.DEFINE_string("json", None, "write the numbers here too")
_TEXTS = flags.DEFINE_string("texts", None, "write the compiled programs into this directory")


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    del argv
    # Programs for chips that are not there cannot be read back from the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:4.0f} s] {line}", flush=True)

    if _CONFIG.value is None or _TOPOLOGY.value is None:
        raise ConfigError(
            "--config and --topology are needed; e.g. --config=configs/grpo_qwen2vl_2b.py "
            "--topology=v5e:2x4"
        )
    texts_dir = Path(_TEXTS.value) if _TEXTS.value else None
    json_path = Path(_JSON.value) if _JSON.value else None
    command_line.check_folder("--texts", texts_dir)
    command_line.check_file("--json", json_path)
    cfg = reading.from_config(RunConfig, _CONFIG.value)
    if cfg.screen_px:  # sizes that follow from the model's tokenizer, which must be here
        cfg = completed(cfg, say)
    planned = programs.find_model(cfg.model.path)
    machine = machines.find_machine(_TOPOLOGY.value)
    names = programs.TRAINING + (programs.SAMPLING if _SAMPLING.value else ())
    plan = plans.make_plan(cfg, planned, machine, names, say, texts_dir)
    print(report.format_plan(plan), flush=True)  # before the next minutes, which may be cut short
    if not plan["fits"] and machine.devices is not None:
        plan["nearest_change"] = plans.find_nearest_change(cfg, planned, machine, plan, say)
        print(f"nearest change that fits: {plan['nearest_change']}", flush=True)
    if _SEARCH.value:
        plan["search"] = []
        for words, found in plans.search(cfg, planned, machine, _MOST.value, say):
            plan["search"].append({"change": words, **found})
            print(
                f"  {'fits        ' if found['fits'] else 'does not fit'} "
                f"{found['peak_bytes'] / report.GIB:6.2f} GiB "
                f"{found['step']['tokens_per_s']:9.0f} tokens/s at most  {words}"
            )
        best = next((entry for entry in plan["search"] if entry["fits"]), None)
        print(f"best that fits: {best['change'] if best else 'none of those tried'}")
    if json_path is not None:
        command_line.write_json(json_path, plan)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
