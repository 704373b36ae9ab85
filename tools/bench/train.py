"""How fast a training step is, beside its peers, in one run on one machine.

    python -m tools.bench train --peers --family=qwen3_vl --json=bench.json
    python -m tools.bench train --peers --platform=cuda --model=Qwen2-VL-2B-Instruct

The work is a group of eight trajectories of one turn: one screenshot of 160 visual tokens (448x280,
for Qwen3-VL 512x320) and a prompt of 64 tokens that all of them share, 32 sampled tokens each; a
model of the family with 70 M random weights (`models`), LoRA of rank 16 on q, k, v and o, frozen
vision tower, float32, the clipped policy loss with the KL term against the base (adapters off),
AdamW. Every contender is a process of its own that starts from the same weights, adapters and
arrays; they take turns, one step each, with the machine's matrix rate measured before every step,
because it drifts; CPU time is what a step took of all threads, without what other processes took
from it. Nothing is timed before two steps of all of them computed the same (`CHECKED`);
the second step depends on the first one's update.

`--model` takes a model of published dimensions, with random weights in bfloat16, and one screen of
1280x800 (`work.DESKTOP`); `--platform=cuda` measures on an NVIDIA GPU, where torch must be a build
for CUDA, and was only run with `--model`. In bfloat16 numbers agree less closely (`RELATIVE`), and
where they do not, the table says so below.

Peers (`peers`, extra `bench`): transformers and peft in torch. Nothing is downloaded.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.bench import models, work
from tools.bench.processes import Worker, answer_questions
from uirl_jax import metrics, platform_flags

RATE_SIZE = 1536  # of the square matrix product that measures the machine
# Ours with a row for every sequence, as the peers have it: what sharing the prompt is worth.
OURS = ("ours", "ours_prompts_apart")
PEERS = ("torch_peft", "torch_peft_encoded_once")
# What contenders compute in a step and its metric in ours. The advantages of the group cancel in
# the loss, which is left with the KL term: the mean negative log-probability of the sampled tokens
# and the norm of the gradient say more. kl is to the base, before its coefficient.
CHECKED = {
    "loss": "learner/loss",
    "nll": "actor/entropy",
    "kl": "actor/kl_loss",
    "grad_norm": "learner/grad_norm",
}
# Largest difference by the dtype. In float32 rounding alone is 2e-5 of kl, 1e-7 of loss; bfloat16
# has eight bits, and kl is the difference of two passes.
RELATIVE = {"float32": 1e-4, "bfloat16": 0.1}
ABSOLUTE = {"float32": 1e-6, "bfloat16": 1e-4}


def add_flags(parser: argparse.ArgumentParser) -> None:
    models.add_flags(parser)
    parser.add_argument("--peers", action="store_true", help="also torch with transformers, peft")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, after the first")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return compare(*models.chosen(args), args.peers, args.rounds, args.platform)


# ------------------------------------------------------------------------------------------- ours


class OurWork(NamedTuple):
    """What the learner has at hand for a step."""

    steps: Any
    state: Any
    frozen: Any
    algorithm_cfg: Any
    group: list[Any]
    make_batches: Callable[..., Any]


def our_work(directory: Path, *, share_prompts: bool) -> OurWork:
    """Ours: what the learner does with a group of records, from screenshot files to the update."""
    from uirl_jax.learner import algorithm
    from uirl_jax.learner import state as learner_state
    from uirl_jax.learner import step as learner_step
    from uirl_jax.rl.losses import PolicyLossConfig
    from uirl_jax.shards import batching
    from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

    arrays = np.load(directory / "arrays.npz")
    model = work.load_model(directory)
    optimizer = learner_state.make_optimizer(
        learner_state.OptimizerConfig(lr=work.LEARNING_RATE, clip_norm=1e9), 1000
    )
    # As if an actor with the newest policy had sampled: no correction for lag.
    algorithm_cfg = algorithm.AlgorithmConfig(
        loss=PolicyLossConfig(kl_coefficient=work.KL_COEFFICIENT, importance="none")
    )
    steps = learner_step.make_steps(
        model.graphdef, optimizer, learner_step.StepConfig(algorithm_cfg.loss)
    )
    state = learner_state.init_state(model.trainable, optimizer)
    prompt_length = int(arrays["prompt_length"])
    screenshot = (directory / "screenshot.png").read_bytes()
    key = hashlib.sha256(screenshot).hexdigest()
    group = [
        Trajectory(
            episode_id=str(number),
            group_id="0",
            task=TaskSpec("bench", seed=0),
            instruction="",
            turns=(
                Turn(
                    context_ids=token_ids_t[:prompt_length],
                    token_ids=token_ids_t[prompt_length:],
                    logprobs=np.zeros(len(token_ids_t) - prompt_length, np.float32),
                    full_logprobs=np.zeros(len(token_ids_t) - prompt_length, np.float32),
                    policy_versions=np.zeros(len(token_ids_t) - prompt_length, np.int32),
                    image_keys=(key,),
                    text="",
                    action=None,
                ),
            ),
            images={key: screenshot},
            image_tokens={key: np.count_nonzero(token_ids_t == model.cfg.image_token_id)},
            stop_reason=StopReason.COMPLETED,
            reward=float(reward),
            success=False,
        )
        for number, (token_ids_t, reward) in enumerate(
            zip(arrays["token_ids_bt"], arrays["rewards_g"], strict=True)
        )
    ]
    sampled = arrays["token_ids_bt"].shape[1] - prompt_length
    in_a_row = len(group) if share_prompts else 1
    row_length = prompt_length - 1 + in_a_row * (1 + sampled)
    batch_cfg = batching.BatchConfig(
        rows=len(group) // in_a_row,
        row_lengths=(-(-row_length // 8) * 8,),
        sampled_lengths=(in_a_row * sampled,),
        image_rows=(1,),
        patch_lengths=(len(arrays["patches_pf"]),),
        share_prompts=share_prompts,
    )

    make_batches = functools.partial(
        batching.make_batches,
        inputs=model.inputs,
        cfg=batch_cfg,
    )
    return OurWork(steps, state, model.frozen, algorithm_cfg, group, make_batches)


def jax_step(directory: Path, *, share_prompts: bool) -> Callable[[], dict[str, float]]:
    """A step of ours, from records to the update: what it computed, by the names of CHECKED."""
    from uirl_jax.learner import algorithm

    ours = our_work(directory, share_prompts=share_prompts)
    state = ours.state

    def step() -> dict[str, float]:
        nonlocal state
        state, metrics, _ = algorithm.learn(
            [ours.group],
            ours.algorithm_cfg,
            ours.steps,
            state,
            ours.frozen,
            make_batches=ours.make_batches,
            mesh=None,
            seed=0,
        )
        return {name: metrics[metric] for name, metric in CHECKED.items()}

    return step


def counted_gflop(directory: Path, *, share_prompts: bool) -> float:
    """Matrix products of the compiled step of ours, loops multiplied out."""
    from tools.planner import hlo
    from uirl_jax.learner import step as learner_step

    ours = our_work(directory, share_prompts=share_prompts)
    params, at = learner_step.params_of(ours.state), (np.int32(0),) * 3
    total = 0.0
    for batch in ours.make_batches(ours.group):
        arrays = learner_step.to_device(batch, None)
        score = ours.steps.score.lower(params, ours.frozen, arrays)
        scored = ours.steps.score(params, ours.frozen, arrays)
        gradients = ours.steps.policy_gradients.lower(params, ours.frozen, arrays, scored, at)
        for lowered in (score, gradients):
            total += hlo.Program(lowered.compile().as_text()).cost.flops
    return total / 1e9


# -------------------------------------------------------------------------------- the contenders


def matrix_rate() -> float:
    """GFLOP/s of a plain float32 product in numpy, work.THREADS threads, on the host."""
    rng = np.random.default_rng(0)
    a, b = (rng.random((RATE_SIZE, RATE_SIZE), np.float32) for _ in range(2))
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started_s)
    return 2 * RATE_SIZE**3 / min(seconds) / 1e9


def answer(name: str, directory: Path, platform: str) -> None:
    """A contender's process: a step for every question; its seconds, results and peak memory."""
    if name in OURS:
        import jax

        platform_flags.set_defaults()
        step = jax_step(directory, share_prompts=name == "ours")

        def device_gib() -> float:
            stats = jax.local_devices()[0].memory_stats() or {}
            return stats.get("peak_bytes_in_use", 0) / 2**30
    else:
        from tools.bench import peers

        encode_once = name == "torch_peft_encoded_once"
        step = peers.torch_step(directory, encode_once=encode_once, device=platform)
        device_gib = peers.device_gib

    def measured(question: str) -> dict[str, float]:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        computed = step()
        return {
            **computed,
            "seconds": time.perf_counter() - started_s,
            "cpu_seconds": time.process_time() - started_cpu_s,
            "rss_gib": metrics.peak_rss_gib(),
            "device_gib": device_gib(),
        }

    answer_questions(measured)


class Contender:
    """One contender's process and the steps that it took. The first one is taken at once."""

    def __init__(self, name: str, directory: Path, platform: str) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        environment = os.environ | {
            "JAX_PLATFORMS": platform,
            "XDG_CACHE_HOME": str(directory / "cache"),  # of compiled programs: empty at first
            "OMP_NUM_THREADS": str(work.THREADS),
            "OMP_WAIT_POLICY": "PASSIVE",  # a contender that waits takes nothing from the others
        }
        started_s = time.perf_counter()
        self._worker = Worker(
            "tools.bench.train", name, str(directory), platform, environment=environment
        )
        self.step()
        self.start_seconds = time.perf_counter() - started_s  # imports, weights, compiling, a step
        print(
            f"{name}: from the start of the process to the end of a step "
            f"{self.start_seconds:.1f} s",
            flush=True,
        )

    def step(self) -> dict[str, float]:
        self.steps.append(self._worker.ask("step"))
        return self.steps[-1]

    def close(self) -> None:
        self._worker.close()


def differences(steps: dict[str, list[dict[str, float]]], dtype: str = "float32") -> list[str]:
    """Where contenders computed something else than the first one, in words."""
    (first, ours), *others = steps.items()
    return [
        f"step {number}: {key}={theirs[key]:.8f} of {name}, {mine[key]:.8f} of {first}"
        for name, taken in others
        for number, (mine, theirs) in enumerate(zip(ours, taken, strict=True))
        for key in CHECKED
        if not np.isclose(theirs[key], mine[key], rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype])
    ]


def compare(
    family: str, cfg: Any, size: work.Size, peers: bool, rounds: int, platform: str = "cpu"
) -> dict[str, Any]:
    """Steps of all contenders, interleaved on the CPU; two first ones compile and are checked.

    Raises: SystemExit: the contenders do not do the same work.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.write_work(directory, family, cfg, size)
        gflop = {}
        if platform == "cpu":  # CUDA's programs call libraries that hide the products
            # Here, where oneDNN is not asked for: its calls would hide them too.
            gflop = {n: counted_gflop(directory, share_prompts=n == "ours") for n in OURS}
        cold = Contender("ours", directory, platform)
        cold.close()
        names = (*OURS, *(PEERS if peers else ()))
        together = [names]
        if platform == "cuda":
            # A GPU is nobody else's, so they need not take turns, and its memory has no room for
            # all of them; what computes the prompt in every row was not tried there.
            together = [(name,) for name in names if name != "ours_prompts_apart"]
        contenders: list[Contender] = []
        rates = []
        for some in together:
            # Again, with the programs that the first process compiled.
            started = [Contender(name, directory, platform) for name in some]
            for contender in started:
                stack.callback(contender.close)
                contender.step()
            contenders += started
            wrong = differences({one.name: one.steps[:2] for one in contenders}, size.dtype)
            if wrong and size.dtype == "float32":
                raise SystemExit(f"error: not the same work: {'; '.join(wrong)}")
            for number in range(1, rounds + 1):
                for contender in started:
                    rates.append(matrix_rate())
                    taken = contender.step()
                    print(
                        f"round={number}/{rounds} matrix_gflops={rates[-1]:.0f} "
                        f"contender={contender.name} seconds={taken['seconds']:.3f} "
                        f"cpu_seconds={taken['cpu_seconds']:.2f} "
                        f"nll={taken['nll']:.6f} grad_norm={taken['grad_norm']:.6f}",
                        flush=True,
                    )
            for contender in started:
                contender.close()
    rows: dict[str, Any] = {contender.name: _row(contender) for contender in contenders}
    ours, ours_cpu = rows["ours"]["seconds"], rows["ours"]["cpu_seconds"]
    rows["ours"]["start_seconds_without_cache"] = cold.start_seconds
    rate = statistics.median(rates)
    for name in gflop:
        # The step as a share of what the machine's plain matrix product would take.
        share = gflop[name] / rows[name]["seconds"] / rate
        rows[name] |= {"gflop": gflop[name], "of_matrix_rate": share}
    taken_steps = {contender.name: contender.steps for contender in contenders}
    return {
        "family": family,
        "wrong": differences(taken_steps, size.dtype),
        **rows,
        "ratio": {n: row["seconds"] / ours for n, row in rows.items() if n != "ours"},
        "cpu_ratio": {n: row["cpu_seconds"] / ours_cpu for n, row in rows.items() if n != "ours"},
        "matrix_gflops": rate,
    }


def _row(contender: Contender) -> dict[str, float]:
    steps = contender.steps
    seconds = [taken["seconds"] for taken in steps[2:]]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "cpu_seconds": statistics.median(taken["cpu_seconds"] for taken in steps[2:]),
        "first": {name: steps[0][name] for name in CHECKED},
        "last": {name: steps[-1][name] for name in CHECKED},
        "peak_rss_gib": steps[-1]["rss_gib"],
        "peak_device_gib": steps[-1]["device_gib"],
        "start_seconds": contender.start_seconds,
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['family']}",
        f"{'':26s}{'median':>9s}{'range':>16s}{'x ours':>8s}{'CPU':>9s}{'x ours':>8s}"
        f"{'peak GiB':>10s}{'on device':>10s}{'nll':>10s}{'gradient':>10s}",
    ]
    for name in (name for name in (*OURS, *PEERS) if name in result):
        row = result[name]
        spread = f"{row['fastest']:.3f} - {row['slowest']:.3f}"
        ratio, cpu_ratio = (result[key].get(name, 1.0) for key in ("ratio", "cpu_ratio"))
        lines.append(
            f"{name:26s}{row['seconds']:7.3f} s{spread:>16s}{ratio:8.2f}"
            f"{row['cpu_seconds']:7.2f} s{cpu_ratio:8.2f}{row['peak_rss_gib']:10.2f}"
            f"{row['peak_device_gib']:10.2f}"
            f"{row['last']['nll']:10.5f}{row['last']['grad_norm']:10.5f}"
        )
    for name in (name for name in OURS if "gflop" in result.get(name, {})):
        row = result[name]
        lines.append(
            f"{name}: {row['gflop']:.0f} GFLOP of matrix products a step, at "
            f"{row['of_matrix_rate']:.0%} of the matrix rate"
        )
    lines.append(f"matrix rate {result['matrix_gflops']:.0f} GFLOP/s (numpy, median)")
    lines += result["wrong"]
    return "\n".join(lines)


if __name__ == "__main__":
    answer(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
