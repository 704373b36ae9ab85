"""How fast a training step is, beside its peers, in one run on one machine.

    python -m tools.bench train --peers --json=bench.json

The work is a group of eight trajectories of one turn: one screenshot of 448x280 (160 visual tokens)
and a prompt of 64 tokens that all of them share, 32 sampled tokens each; a Qwen2-VL of 69.6 M
parameters with random weights, LoRA of rank 16 on q, k, v and o, frozen vision tower, float32, the
clipped policy loss with the KL term against the base (adapters off), AdamW. Every contender is a
process of its own that starts from the same weights, adapters and arrays; they take turns, one step
each, with the machine's matrix rate measured before every step, because it drifts. The losses that
they print show that they do the same work.

Peers (`bench_peers`, extra `bench`): transformers and peft in torch. Nothing is downloaded.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools import bench_algorithms, bench_browser, bench_client, bench_load
from uirl_jax import platform_flags

THREADS = 2
RATE_SIZE = 1536  # of the square matrix product that measures the machine
KL_COEFFICIENT = 0.01
LEARNING_RATE = 1e-4
RANK, ALPHA = 16, 32.0


@dataclasses.dataclass(frozen=True)
class Size:
    """What one step works on."""

    group: int = 8
    image_px: tuple[int, int] = (448, 280)
    prompt_tokens: int = 64
    sampled_tokens: int = 32


SMALL = Size()
# Ours with a row for every sequence, as the peers have it: what sharing the prompt is worth.
OURS = ("ours", "ours_prompts_apart")
PEERS = ("torch_peft", "torch_peft_encoded_once")


def model_config() -> dict[str, Any]:
    """config.json of the size "small": 69.6 M parameters."""
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 640,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "intermediate_size": 1728,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
        "vision_config": {
            "depth": 8,
            "embed_dim": 320,
            "num_heads": 5,
            "mlp_ratio": 4,
            "hidden_size": 640,
            "in_channels": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
    }


# ------------------------------------------------------------------------------- the same work


def write_work(directory: Path, size: Size) -> None:
    """The model, its adapters (PEFT's format) and the arrays of a step, for every contender."""
    import jax
    from flax import nnx

    from uirl_jax import vision_inputs
    from uirl_jax.models import peft_adapters, qwen2_vl, qwen2_vl_weights
    from uirl_jax.models.lora import LoraConfig, LoRAParam

    cfg = qwen2_vl.Qwen2VLConfig.from_dict(model_config())
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=("attention",))
    qwen2_vl_weights.save_pretrained(qwen2_vl.Qwen2VL(cfg, rngs=nnx.Rngs(0)), directory / "model")
    model = qwen2_vl.Qwen2VL(cfg, lora=lora, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    # B is zero in fresh adapters: then the KL term and half of the gradients would be zero.
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.01 * rng.normal(size=leaf.shape).astype(np.float32),
        nnx.state(model, LoRAParam),
    )
    nnx.update(model, noisy)
    peft_adapters.save_adapter(model, directory / "adapter")

    image_cfg = vision_inputs.ImageConfig()
    width_px, height_px = size.image_px
    pixels_hwc = rng.integers(0, 256, (height_px, width_px, 3), np.uint8)
    from PIL import Image

    image = Image.fromarray(pixels_hwc)
    image.save(directory / "screenshot.png")
    patches_pf, grid = vision_inputs.process_image(image, image_cfg)
    visual = vision_inputs.num_visual_tokens(grid, image_cfg.merge_size)
    words = size.prompt_tokens - 2
    prompt = [
        *rng.integers(100, cfg.vocab_size, words // 2).tolist(),
        cfg.vision_start_token_id,
        *[cfg.image_token_id] * visual,
        cfg.vision_end_token_id,
        *rng.integers(100, cfg.vocab_size, words - words // 2).tolist(),
    ]
    sampled_gs = rng.integers(100, cfg.vocab_size, (size.group, size.sampled_tokens))
    token_ids_bt = np.array([[*prompt, *sampled_s] for sampled_s in sampled_gs], np.int32)
    rewards_g = rng.normal(size=size.group)
    np.savez(
        directory / "arrays.npz",
        token_ids_bt=token_ids_bt,
        prompt_length=len(prompt),
        rewards_g=rewards_g,
        advantages_g=((rewards_g - rewards_g.mean()) / rewards_g.std()).astype(np.float32),
        patches_pf=patches_pf,
        grid_thw=np.array(grid),
    )


def load_model(directory: Path) -> tuple[Any, Any, Any, Any]:
    """The model that `write_work` wrote: (graphdef, adapters, frozen, its config)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from uirl_jax.models import peft_adapters, qwen2_vl_weights
    from uirl_jax.models.lora import LoRAParam

    adapter = peft_adapters.load_adapter(
        directory / "adapter", qwen2_vl_weights.read_config(directory / "model")
    )
    model = qwen2_vl_weights.load_pretrained(
        directory / "model",
        lora=adapter.lora,
        param_dtype=jnp.float32,
        init_key=jax.random.key(0),
        remat="none",
    )
    abstract = nnx.state(model, LoRAParam)
    nnx.update(model, qwen2_vl_weights.adapters_from_numpy(adapter.arrays, abstract))
    graphdef, adapters, frozen = nnx.split(model, LoRAParam, ...)
    return graphdef, adapters, frozen, model.cfg


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

    from uirl_jax import vision_inputs
    from uirl_jax.learner import algorithm
    from uirl_jax.learner import state as learner_state
    from uirl_jax.learner import step as learner_step
    from uirl_jax.rl.losses import PolicyLossConfig
    from uirl_jax.shards import batching
    from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

    arrays = np.load(directory / "arrays.npz")
    graphdef, adapters, frozen, model_cfg = load_model(directory)
    optimizer = learner_state.make_optimizer(
        learner_state.OptimizerConfig(lr=LEARNING_RATE, clip_norm=1e9), 1000
    )
    # As if an actor with the newest policy had sampled: no correction for lag.
    algorithm_cfg = algorithm.AlgorithmConfig(
        loss=PolicyLossConfig(kl_coefficient=KL_COEFFICIENT, importance="none")
    )
    steps = learner_step.make_steps(
        graphdef, optimizer, learner_step.StepConfig(algorithm_cfg.loss)
    )
    state = learner_state.init_state(adapters, optimizer)
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
            image_grids={key: tuple(arrays["grid_thw"].tolist())},
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
        image_cfg=vision_inputs.ImageConfig(),
        image_token_id=model_cfg.image_token_id,
        cfg=batch_cfg,
    )
    return OurWork(steps, state, frozen, algorithm_cfg, group, make_batches)


def jax_step(directory: Path, *, share_prompts: bool) -> Callable[[], float]:
    """A step of ours, from records to the update."""
    from uirl_jax.learner import algorithm

    ours = our_work(directory, share_prompts=share_prompts)
    state = ours.state

    def step() -> float:
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
        return metrics["learner/loss"]

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
    """GFLOP/s of a plain float32 product in numpy, THREADS threads."""
    rng = np.random.default_rng(0)
    a, b = (rng.random((RATE_SIZE, RATE_SIZE), np.float32) for _ in range(2))
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started_s)
    return 2 * RATE_SIZE**3 / min(seconds) / 1e9


def work(name: str, directory: Path) -> None:
    """A contender's process: one step for every line on stdin, its seconds and loss on stdout."""
    if name in OURS:
        platform_flags.set_defaults()
        step = jax_step(directory, share_prompts=name == "ours")
    else:
        from tools import bench_peers

        step = bench_peers.torch_step(directory, encode_once=name == "torch_peft_encoded_once")
    for _ in sys.stdin:
        started_s = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - started_s
        print(json.dumps({"seconds": seconds, "loss": loss, "rss_gib": peak_rss_gib()}), flush=True)


def peak_rss_gib() -> float:
    from uirl_jax import metrics

    return metrics.peak_rss_gib()


class Contender:
    """One contender's process, told to take steps. The first one is taken at once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(directory / "cache"),  # of compiled programs: empty at first
            "OMP_NUM_THREADS": str(THREADS),
            "OMP_WAIT_POLICY": "PASSIVE",  # a contender that waits takes nothing from the others
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench", "work", name, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started_s = time.perf_counter()
        self.step()
        self.start_seconds = time.perf_counter() - started_s  # imports, weights, compiling, a step

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.name} ended with exit code {self._process.wait()}")
        self.steps.append(json.loads(line))
        return self.steps[-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def train(peers: bool, rounds: int, size: Size) -> dict[str, Any]:
    """Interleaved steps of all contenders; the first of each compiles and warms up."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_work(directory, size)
        # Here, where oneDNN is not asked for: its calls would hide the products.
        gflop = {n: counted_gflop(directory, share_prompts=n == "ours") for n in OURS}
        contenders: list[Contender] = []
        try:
            cold = _start("ours", directory)
            cold.close()
            # Again, with the programs that the first process compiled.
            for contender in (*OURS, *(PEERS if peers else ())):
                contenders.append(_start(contender, directory))
            rates = []
            for number in range(1, rounds + 1):
                for contender in contenders:
                    rates.append(matrix_rate())
                    taken = contender.step()
                    print(
                        f"round={number}/{rounds} matrix_gflops={rates[-1]:.0f} "
                        f"contender={contender.name} seconds={taken['seconds']:.2f} "
                        f"loss={taken['loss']:.6f}",
                        flush=True,
                    )
        finally:
            for contender in contenders:
                contender.close()
    rows = {contender.name: _row(contender) for contender in contenders}
    ours = rows["ours"]["seconds"]
    rows["ours"]["start_seconds_without_cache"] = cold.start_seconds
    rate = statistics.median(rates)
    for name in OURS:
        # The step as a share of what the machine's plain matrix product would take.
        share = gflop[name] / rows[name]["seconds"] / rate
        rows[name] |= {"gflop": gflop[name], "of_matrix_rate": share}
    return {
        **rows,
        "ratio": {n: row["seconds"] / ours for n, row in rows.items() if n != "ours"},
        "matrix_gflops": statistics.median(rates),
    }


def _start(name: str, directory: Path) -> Contender:
    contender = Contender(name, directory)
    seconds = contender.start_seconds
    print(f"{name}: from the start of the process to the end of a step {seconds:.1f} s", flush=True)
    return contender


def _row(contender: Contender) -> dict[str, float]:
    steps = contender.steps
    seconds = [taken["seconds"] for taken in steps[1:]]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "peak_rss_gib": steps[-1]["rss_gib"],
        "start_seconds": contender.start_seconds,
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{'':26s}{'median':>9s}{'range':>16s}{'x ours':>8s}{'peak GiB':>10s}{'loss':>12s}"]
    for name, row in result.items():
        if name in ("ratio", "matrix_gflops"):
            continue
        spread = f"{row['fastest']:.2f} - {row['slowest']:.2f}"
        ratio = result["ratio"].get(name, 1.0)
        lines.append(
            f"{name:26s}{row['seconds']:7.2f} s{spread:>16s}{ratio:8.2f}{row['peak_rss_gib']:10.2f}"
            f"{row['last_loss']:12.6f}"
        )
    for name in OURS:
        row = result[name]
        lines.append(
            f"{name}: {row['gflop']:.0f} GFLOP of matrix products a step, at "
            f"{row['of_matrix_rate']:.0%} of the matrix rate"
        )
    lines.append(f"matrix rate {result['matrix_gflops']:.0f} GFLOP/s (numpy, median)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="a training step, beside its peers")
    training.add_argument("--peers", action="store_true", help="also torch with transformers, peft")
    training.add_argument("--rounds", type=int, default=5, help="steps of each, after the first")
    training.add_argument("--json", type=Path, help="write the numbers here too")
    bench_load.add_command(commands)
    bench_algorithms.add_command(commands)
    bench_browser.add_command(commands)
    bench_client.add_command(commands)
    faults = commands.add_parser("faults", help="what verifiers' faults do to the actor")
    faults.add_argument("--episodes", type=int, default=2000, help="of the mixed run")
    faults.add_argument("--json", type=Path, help="write the numbers here too")
    hosting = commands.add_parser("host", help="an actor host with many episodes at once")
    hosting.add_argument("--episodes", type=int, default=256, help="at once")
    hosting.add_argument("--seconds", type=float, default=20.0, help="measured, of each size")
    hosting.add_argument("--sizes", nargs="+", default=["224x168", "1280x800"], help="of screens")
    hosting.add_argument("--json", type=Path, help="write the numbers here too")
    measuring = commands.add_parser("overhead", help="of a step beside the model's passes")
    algorithms = bench_algorithms.ALGORITHMS
    measuring.add_argument("--names", nargs="+", choices=algorithms, default=algorithms)
    measuring.add_argument("--rounds", type=int, default=9, help="steps of each, after the first")
    measuring.add_argument("--json", type=Path, help="write the numbers here too")
    sampling = commands.add_parser("sample", help="sampled tokens a second, beside its peer")
    sampling.add_argument("--peers", action="store_true", help="also transformers' generate")
    sampling.add_argument("--rounds", type=int, default=5, help="of each, after the first")
    sampling.add_argument("--json", type=Path, help="write the numbers here too")
    sampler = commands.add_parser("work-sample", help="one contender's process (used by sample)")
    sampler.add_argument("name", choices=("ours", "transformers"))
    sampler.add_argument("directory", type=Path)
    working = commands.add_parser("work", help="one contender's process (used by train)")
    working.add_argument("name", choices=(*OURS, *PEERS))
    working.add_argument("directory", type=Path)
    args = parser.parse_args()
    if args.command == "work":
        work(args.name, args.directory)
        return
    if args.command == "work-sample":
        from tools import bench_sample  # as for overhead below

        bench_sample.work(args.name, args.directory)
        return
    if args.command == "load":
        platform_flags.set_defaults()
        result = bench_load.load(bench_load.settings_of(args), args.directory)
        print(bench_load.format_table(result))
    elif args.command == "algorithms":
        result = bench_algorithms.compare(args)
        print(bench_algorithms.format_table(result))
    elif args.command == "verifiers":
        result = bench_browser.measure(args.sessions, args.turns)
        print(bench_browser.format_table(result))
    elif args.command == "client":
        result = bench_client.compare(args)
        print(bench_client.format_table(result))
    elif args.command == "faults":
        from tools import bench_faults

        result = bench_faults.run(bench_faults.Settings(mixed_episodes=args.episodes))
        print(bench_faults.format_table(result))
    elif args.command == "host":
        from tools import bench_host  # as for overhead below

        result = bench_host.measure(args.sizes, args.episodes, args.seconds)
        print(bench_host.format_table(result))
    elif args.command == "overhead":
        from tools import bench_overhead  # its imports do not belong into the peers' memory

        platform_flags.set_defaults()
        result = bench_overhead.measure(args)
        print(bench_overhead.format_table(result))
    elif args.command == "sample":
        from tools import bench_sample

        result = bench_sample.compare(args.peers, args.rounds)
        print(bench_sample.format_table(result))
    else:
        result = train(args.peers, args.rounds, SMALL)
        print(format_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result.get("wrong"):  # checks that do not hold
        raise SystemExit(1)


if __name__ == "__main__":
    main()
