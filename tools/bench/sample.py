"""How fast turns are sampled, beside transformers' generate, in one run on one machine.

    python -m tools.bench sample --peers --family=qwen3_vl --json=sample.json
    python -m tools.bench sample --peers --platform=cuda --model=Qwen2-VL-2B-Instruct

The family's model "small" (`models`: 70 M parameters, random weights, float32); a prompt is one
screenshot of 160 visual tokens (448x280, for Qwen3-VL 512x320) and 64 tokens of text, 32 tokens are
sampled. Ours carries LoRA adapters as an actor's engine does, transformers has them merged into its
weights. Nothing is timed before both gave the same greedy tokens for 16 prompts. Every round has
new prompts and new screenshots, so that nothing is known from the round before. Cases:

    group     8 requests of one prompt
    different 16 prompts with a screenshot each
    single    one
    episodes  16 at a time of 10 turns, whose environment answers after 0.05 to 2 s; against the
              same engine when it prefills the whole context every turn

and what a decode step reads (weights, adapters, keys and values) against the bandwidth of a plain
sum over a large array, measured in between. The ratio of CPU time leaves out what other processes
took from both.

`--model` takes a model of published dimensions, with random weights in bfloat16, and prompts with a
screen of 1280x800 (`work.DESKTOP`); `--platform=cuda` measures on an NVIDIA GPU. There, and in
bfloat16, greedy tokens may part where two are about as likely: their share is printed.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench import models, work
from tools.bench.processes import Worker, answer_questions
from uirl_jax import platform_flags

EPISODES, TURNS = 16, 10
TURN_WORDS, TURN_SAMPLED = 14, 16
SCREEN_TOKENS = (8, 6)  # of an episode: visual tokens in a row and a column, 48 a turn
DELAY_S = (0.05, 2.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    models.add_flags(parser)
    parser.add_argument("--peers", action="store_true", help="also transformers' generate")
    parser.add_argument("--rounds", type=int, default=5, help="of each, after the first")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return compare(*models.chosen(args), args.peers, args.rounds, args.platform)


# ---------------------------------------------------------------------------------------- ours


def our_engine(directory: Path, **sizes: Any) -> Any:
    from uirl_jax.engine.engine import Engine, EngineConfig
    from uirl_jax.families.chat import Vocabulary

    model = work.load_model(directory)
    vocabulary = Vocabulary(
        end_token_ids=(-1,),  # never: every request samples as many tokens as it may
        forbidden_ids=work.forbidden_ids(model.cfg),
    )
    size = work.read_size(directory)
    cfg = EngineConfig(max_new_tokens=size.sampled_tokens, cache_dtype=size.dtype, **sizes)
    return Engine(model, vocabulary, cfg)


def sample_request(prompt: work.Prompt, seed: int, sampled: int, temperature: float = 1.0) -> Any:
    from uirl_jax.engine.engine import SampleRequest

    return SampleRequest(
        context_ids=prompt.token_ids_c,
        screens=(prompt.screen,),
        max_new_tokens=sampled,
        temperature=temperature,
        seed=seed,
    )


def our_work(directory: Path) -> Callable[..., dict[str, Any]]:
    """One round of a case: seconds, tokens, and what a decode step took; or greedy tokens."""
    size = work.read_size(directory)
    engine = our_engine(
        directory,
        batch_sizes=(1, 8, 16),
        context_lengths=(size.context_tokens,),
        prefill_rows=(1, 4),
        prefill_lengths=(size.context_tokens,),
        image_rows=(1, 4),
        image_row_patches=4 * math.prod(size.image_tokens),
        decode_steps=size.sampled_tokens,
    )

    async def sample_all(requests: list[Any]) -> tuple[float, float, list[Any]]:
        async with engine:
            await engine.warm_up()
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            samples = await asyncio.gather(*map(engine.sample, requests))
            cpu_s = time.process_time() - started_cpu_s
            return time.perf_counter() - started_s, cpu_s, samples

    def play_round(case: str, round_number: int, greedy: bool = False) -> dict[str, Any]:
        requests = [
            sample_request(prompt, n, size.sampled_tokens, temperature=0.0 if greedy else 1.0)
            for n, prompt in enumerate(work.prompts(directory, case, round_number))
        ]
        before = engine.metrics()
        seconds, cpu_s, samples = asyncio.run(sample_all(requests))
        if greedy:
            return {"token_ids": [sample.token_ids.tolist() for sample in samples]}
        after = engine.metrics()
        spent = {key: after[key] - before[key] for key in after}
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "tokens": spent["engine/tokens_sampled"],
            "decode_step_s": spent["engine/decode_s"] / spent["engine/decode_steps"],
        }

    return play_round


def our_episodes(directory: Path, *, cached: bool) -> dict[str, float]:
    """All episodes at once, with environments that take their time; tokens/s and idle share."""
    most = (TURN_WORDS + 2 + 48 + TURN_SAMPLED) * TURNS
    engine = our_engine(
        directory,
        batch_sizes=(1, 2, 4, 8, EPISODES),
        context_lengths=(most // 4, most // 2, most),
        prefill_rows=(1, 2, 4),
        prefill_lengths=(80, 320),
        image_rows=(1, 4),
        image_row_patches=192,
        image_tokens=EPISODES * TURNS * 48,
        decode_steps=4,
    )
    if not cached:
        # What other engines do between turns: every turn finds its slot empty.
        pool = engine._rounds.pool
        finish = pool.finish
        pool.finish = lambda slot, contents_c, computed: finish(slot, contents_c, 0)
    waiting = 0
    idle_s = [0.0, 0.0]  # with a request waiting; in all

    async def episode(number: int) -> int:
        nonlocal waiting
        rng = np.random.default_rng([7, number])
        request, sampled_s = None, np.zeros(0, np.int32)
        for turn in range(TURNS):
            await asyncio.sleep(rng.uniform(*DELAY_S))
            new = work.prompt(directory, rng, f"{number}-{turn}", TURN_WORDS, SCREEN_TOKENS)
            fresh = dataclasses.replace(
                sample_request(new, number * TURNS + turn, TURN_SAMPLED), episode=str(number)
            )
            if request is not None:
                fresh = dataclasses.replace(
                    fresh,
                    context_ids=np.concatenate([request.context_ids, sampled_s, fresh.context_ids]),
                    screens=request.screens + fresh.screens,
                )
            waiting += 1
            sampled_s = (await engine.sample(fresh)).token_ids
            waiting -= 1
            request = fresh
        engine.release(str(number))
        return TURNS * TURN_SAMPLED

    async def run() -> tuple[float, float, int]:
        async with engine:
            await engine.warm_up()
            before = engine.metrics()
            started_s = time.perf_counter()
            watching = asyncio.create_task(watch())
            tokens = sum(await asyncio.gather(*map(episode, range(EPISODES))))
            watching.cancel()
            seconds = time.perf_counter() - started_s
            after = engine.metrics()
            return seconds, after["engine/busy_s"] - before["engine/busy_s"], tokens

    async def watch() -> None:
        """How much of the time a request waited."""
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0.002)
            spent_s = time.perf_counter() - started_s
            idle_s[1] += spent_s
            idle_s[0] += spent_s if waiting else 0.0

    seconds, busy_s, tokens = asyncio.run(run())
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "idle_while_waiting": max(0.0, 1.0 - busy_s / idle_s[0]),
        "mean_wait_s": engine.metrics()["engine/queue_s"],
    }


def read_rate() -> float:
    """GB/s of a sum over half a gigabyte, the best of five."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2**27,), jnp.float32)
    total = jax.jit(lambda x: x.reshape(64, -1).sum(axis=1))
    total(x).block_until_ready()
    best = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        total(x).block_until_ready()
        best = min(best, time.perf_counter() - started_s)
    return x.nbytes / best / 1e9


def decode_bytes(cfg: Any, size: work.Size, rows: int) -> float:
    """What a decode step has to read: the text tower, the head, adapters, the context's cache."""
    dim, wide = cfg.hidden_size, cfg.intermediate_size
    q_dim = cfg.num_attention_heads * cfg.head_dim
    kv_dim = cfg.num_key_value_heads * cfg.head_dim
    block = 2 * dim * (q_dim + kv_dim) + 3 * dim * wide
    adapters = work.RANK * 2 * (dim + q_dim + dim + kv_dim)
    context = size.context_tokens + size.sampled_tokens / 2
    held_bytes = 2 if size.dtype == "bfloat16" else 4
    layer = held_bytes * (block + rows * context * 2 * kv_dim) + 4 * adapters
    return float(cfg.num_hidden_layers * layer + held_bytes * cfg.vocab_size * dim)


# ----------------------------------------------------------------------------------- the contest


def answer(name: str, directory: Path, platform: str) -> None:
    """A contender's process: what the case of a question came to."""
    if name == "ours":
        platform_flags.set_defaults()
        play_round = our_work(directory)
    else:
        from tools.bench import peers

        play_round = peers.torch_generate(directory, platform)

    def measured(question: dict[str, Any]) -> dict[str, Any]:
        case = question["case"]
        if case == "greedy":
            return play_round("different", question["round"], greedy=True)
        if case == "read_rate":
            return {"gb_per_s": read_rate()}
        if case in ("cached", "uncached"):
            return our_episodes(directory, cached=case == "cached")
        return play_round(case, question["round"])

    answer_questions(measured)


def check_tokens(token_ids: dict[str, list[list[int]]]) -> None:
    """Raises: SystemExit: of some prompt the contenders' greedy tokens differ."""
    prompts = zip(*token_ids.values(), strict=True)
    wrong = [
        f"prompt {number}: {dict(zip(token_ids, rows, strict=True))}"
        for number, rows in enumerate(prompts)
        if any(row != rows[0] for row in rows)
    ]
    if wrong:
        raise SystemExit(f"error: greedy tokens differ: {'; '.join(wrong)}")


def equal_share(first: list[list[int]], *others: list[list[int]]) -> float:
    """Of the tokens up to where a prompt's answers first part; 1.0 of one contender."""
    equal = total = 0
    for rows in zip(first, *others, strict=True):
        same = [len(set(tokens)) == 1 for tokens in zip(*rows, strict=True)]
        equal += same.index(False) if False in same else len(same)
        total += len(same)
    return equal / total


@dataclasses.dataclass
class Answers:
    """What the contenders answered.

    Attributes:
      rounds: by contender and case, without the first round, which warms up.
      greedy: by contender, the tokens of each prompt.
      read_gb_per_s: of every round, while nothing else ran.
      episodes: ours, with the cache of earlier turns and without; empty of a large model.
    """

    rounds: dict[str, dict[str, list[dict[str, float]]]]
    greedy: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    read_gb_per_s: list[float] = dataclasses.field(default_factory=list)
    episodes: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def compare(
    family: str, cfg: Any, size: work.Size, peers: bool, rounds: int, platform: str = "cpu"
) -> dict[str, Any]:
    """Every case, round by round, on the CPU ours and the peer's in turn; medians.

    Raises: SystemExit: the contenders do not do the same work.
    """
    names = ("ours", "transformers") if peers else ("ours",)
    answers = Answers({name: {case: [] for case in work.CASES} for name in names})
    # A GPU is nobody else's, so they need not take turns; its memory has no room for both.
    together = [names] if platform == "cpu" else [(name,) for name in names]
    with tempfile.TemporaryDirectory() as directory:
        work.write_work(Path(directory), family, cfg, size)
        for some in together:
            with contextlib.ExitStack() as stack:
                workers = {
                    name: stack.enter_context(start(name, directory, platform)) for name in some
                }
                measure(workers, answers, size, rounds, platform)
    return result_of(answers, family, cfg, size, rounds)


def start(name: str, directory: str, platform: str) -> Worker:
    environment = os.environ | {
        "JAX_PLATFORMS": platform,
        "OMP_NUM_THREADS": str(work.THREADS),
        # Threads that spin where they wait took the peer twice the CPU time beside other work.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return Worker("tools.bench.sample", name, directory, platform, environment=environment)


def measure(
    workers: Mapping[str, Worker], answers: Answers, size: work.Size, rounds: int, platform: str
) -> None:
    """Adds what these contenders answer, in turn. Raises: SystemExit: see compare."""
    asked = {"case": "greedy", "round": rounds + 1}
    answers.greedy |= {name: worker.ask(asked)["token_ids"] for name, worker in workers.items()}
    if (platform, size.dtype) == ("cpu", "float32"):
        check_tokens(answers.greedy)
    ours = workers.get("ours")
    for number in range(rounds + 1):
        if ours is not None:
            answers.read_gb_per_s.append(ours.ask({"case": "read_rate"})["gb_per_s"])
        for case, (name, worker) in itertools.product(work.CASES, workers.items()):
            answer = worker.ask({"case": case, "round": number})
            if number:
                answers.rounds[name][case].append(answer)
            print(
                f"round={number}/{rounds} case={case} contender={name} "
                f"tokens_per_s={answer['tokens'] / answer['seconds']:.1f} "
                f"cpu_s={answer['cpu_s']:.2f}",
                file=sys.stderr,
                flush=True,
            )
    # Their many sizes take minutes to compile for a model of published dimensions.
    if ours is not None and size == work.SMALL:
        answers.episodes = {kind: ours.ask({"case": kind}) for kind in ("cached", "uncached")}


def result_of(
    answers: Answers, family: str, cfg: Any, size: work.Size, rounds: int
) -> dict[str, Any]:
    read_gb_per_s = max(answers.read_gb_per_s)
    result: dict[str, Any] = {
        "family": family,
        "rounds": rounds,
        "read_gb_per_s": read_gb_per_s,
        "equal_greedy_tokens": equal_share(*answers.greedy.values()),
        "episodes": answers.episodes,
    }
    for name, cases in answers.rounds.items():
        result[name] = {
            case: {
                "tokens_per_s": statistics.median(row["tokens"] / row["seconds"] for row in rows),
                "cpu_s_a_token": statistics.median(row["cpu_s"] / row["tokens"] for row in rows),
                "decode_step_s": statistics.median(row["decode_step_s"] for row in rows),
            }
            for case, rows in cases.items()
        }
    for case, row in result["ours"].items():
        needed = decode_bytes(cfg, size, work.CASES[case]) / (1e9 * read_gb_per_s)
        row["of_read_rate"] = needed / row["decode_step_s"]
        if "transformers" in result:
            peer = result["transformers"][case]
            row["ratio"] = row["tokens_per_s"] / peer["tokens_per_s"]
            row["cpu_ratio"] = peer["cpu_s_a_token"] / row["cpu_s_a_token"]
    return result


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['family']}: median of {result['rounds']} rounds; "
        f"reading {result['read_gb_per_s']:.1f} GB/s; greedy tokens until they part "
        f"{result['equal_greedy_tokens']:.0%}",
        f"{'':12s}{'tokens/s':>10s}{'peer':>8s}{'ratio':>8s}{'of CPU':>8s}{'step ms':>9s}"
        f"{'of reading':>12s}",
    ]
    for case, row in result["ours"].items():
        peer = result.get("transformers", {}).get(case, {}).get("tokens_per_s", float("nan"))
        lines.append(
            f"{case:12s}{row['tokens_per_s']:>10.0f}{peer:>8.0f}{row.get('ratio', 0):>8.2f}"
            f"{row.get('cpu_ratio', 0):>8.2f}"
            f"{1000 * row['decode_step_s']:>9.1f}{row['of_read_rate']:>12.0%}"
        )
    if not result["episodes"]:
        return "\n".join(lines)
    cached, uncached = (result["episodes"][kind] for kind in ("cached", "uncached"))
    ratio = cached["tokens_per_s"] / uncached["tokens_per_s"]
    lines.append(
        f"episodes: {cached['tokens_per_s']:.0f} tokens/s, prefilled anew every turn "
        f"{uncached['tokens_per_s']:.0f} ({ratio:.2f}x); idle while a request waits "
        f"{cached['idle_while_waiting']:.1%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    answer(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
