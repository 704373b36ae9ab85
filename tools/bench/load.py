"""How fast a model directory of full size is read, and how much host memory that takes.

    python -m tools.bench load --json=load.json
    python -m tools.bench load --model=Qwen3-VL-4B-Instruct

Writes a synthetic model of published dimensions in bfloat16 (of Qwen2-VL-2B 4.4 GB of random
numbers, in shards, never in memory as a whole), then in turns reads its files plainly and loads
them, in processes of their own, from a cold cache. The rate of the disk is that of one reader that
reads file after file in blocks of 16 MiB and throws the bytes away. Everything is done twice in its
process and the second time counts: a virtual machine may have to ask its host for memory that it
has not used for a while, at 0.2 to 0.4 GB/s where this was written, and that is no property of a
loader; both are printed.

Memory above the arrays is the process's high-water mark of resident memory, less what it had before
loading and less the bytes of the arrays. Anonymous and file-backed pages are sampled apart as well,
because pages of a mapped file count as resident but can be dropped.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.processes import answer_of
from uirl_jax import assets

if TYPE_CHECKING:  # reading plainly is measured in a process that imports no JAX
    from tools.planner.families import PlannedModel

BLOCK_BYTES = 16 * 2**20
SHARD_BYTES = 1_200_000_000
GIB = 2**30
MEASURED = ("disk", "load_pretrained", "load")  # load: as a run does, with the hash of the base


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is loaded, and how."""

    param_dtype: str = "bfloat16"
    quantize: str = "none"
    rounds: int = 3
    model: str = "Qwen2-VL-2B-Instruct"  # its dimensions; a directory of assets/published


def add_flags(parser: argparse.ArgumentParser) -> None:
    names = sorted(path.name for path in assets.PUBLISHED.iterdir())
    parser.add_argument("--model", choices=names, default=Settings.model)
    parser.add_argument("--directory", type=Path, help="keep the checkpoint here; it is reused")
    parser.add_argument("--param-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantize", choices=("none", "int8"), default="none")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from uirl_jax import platform_flags

    platform_flags.set_defaults()  # XLA_FLAGS, which the processes of the loads inherit
    settings = Settings(args.param_dtype, args.quantize, args.rounds, args.model)
    return load(settings, args.directory)


def write_checkpoint(directory: Path, model: "PlannedModel") -> int:
    """A directory as transformers writes it, with random bfloat16; returns the weights' bytes."""
    from flax import nnx

    from uirl_jax.models import weight_files, weights
    from uirl_jax.store.files import replacing

    (family, cfg), table = model, model.family.weights
    abstract = nnx.eval_shape(lambda: family.make_model(cfg, rngs=nnx.Rngs(0)))
    tensors = [
        weight_files.Tensor(table.current_name(name), leaf.tensor_shape, np.dtype("bfloat16"))
        for leaf in weights.leaves_of(cfg, nnx.state(abstract), table)
        for name in leaf.tensors
    ]
    shards = weight_files.cut(sorted(tensors), SHARD_BYTES)
    rng = np.random.default_rng(0)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with replacing(directory / name) as (file,):
            file.write(weight_files.header(shard))
            for tensor in shard:
                for start in range(0, tensor.size_bytes, BLOCK_BYTES):
                    count = min(BLOCK_BYTES, tensor.size_bytes - start) // 2
                    # Random sign and mantissa under one exponent: magnitudes of 1/64 to 1/32.
                    bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
                    file.write((bits & 0x807F) | 0x3C80)
        weight_map |= {tensor.name: name for tensor in shard}
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    documents = {
        "model.safetensors.index.json": index,
        "config.json": family.to_config_json(cfg),
        "preprocessor_config.json": cfg.images.to_dict(),
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document), encoding="utf-8")
    return total_bytes


def drop_caches(directory: Path) -> str:
    """Makes the next read of the files come from the disk; says by which of two means."""
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
    except OSError:
        return "posix_fadvise"
    return "drop_caches"


def read_plainly(directory: Path) -> float:
    """Seconds to read every weight file from its first byte to its last."""
    block = bytearray(BLOCK_BYTES)
    started_s = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started_s


def load(settings: Settings, directory: Path | None = None) -> dict[str, Any]:
    """Rounds of: read plainly, load_pretrained, load with the hash of the base; medians."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-load-")))
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "config.json").exists():
            from tools.planner.families import read_model

            write_checkpoint(directory, read_model(assets.PUBLISHED / settings.model))
        size_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        flags = (f"--param-dtype={settings.param_dtype}", f"--quantize={settings.quantize}")
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in MEASURED}
        for number in range(1, settings.rounds + 1):
            for name, measured in rows.items():
                # In a process that has loaded nothing before.
                measured.append(answer_of("tools.bench.load", name, str(directory), *flags))
                shown = " ".join(f"{key}={value:.3f}" for key, value in measured[-1].items())
                print(f"round={number}/{settings.rounds} what={name} {shown}", flush=True)
        dropped_by = drop_caches(directory)
    result: dict[str, Any] = {}
    for name, measured in rows.items():
        result[name] = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        result[name]["gb_per_s"] = size_bytes / result[name]["seconds"] / 1e9
    disk_rate = result["disk"]["gb_per_s"]
    ratio = {name: result[name]["gb_per_s"] / disk_rate for name in MEASURED[1:]}
    result |= {"ratio": ratio, "size_gb": size_bytes / 1e9, "cache_dropped_by": dropped_by}
    return result | dataclasses.asdict(settings)


def measure(name: str, directory: Path, settings: Settings) -> dict[str, float]:
    """One of MEASURED, twice: its seconds and, of a load, its memory in GiB."""
    if name == "disk":
        seconds = []
        for _ in range(2):
            drop_caches(directory)
            seconds.append(read_plainly(directory))
        return {"first_seconds": seconds[0], "seconds": seconds[1]}
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from uirl_jax.families import loading
    from uirl_jax.families.table import family_of

    family = family_of(directory)
    jnp.zeros(8).block_until_ready()  # the backend and its threads are not part of a load
    init_key = jax.random.key(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM from here on
    before = _status_bytes()
    seconds = []
    with _sampled() as highest:
        for _ in range(2):
            drop_caches(directory)
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            if name == "load":
                loaded: Any = loading.load(
                    directory,
                    lora=None,
                    seed=0,
                    param_dtype=settings.param_dtype,
                    quantize=settings.quantize,
                ).trainable
            else:
                loaded = nnx.state(
                    loading.read_model(
                        family,
                        directory,
                        family.read_config(directory),
                        lora=None,
                        param_dtype=jnp.dtype(settings.param_dtype),
                        init_key=init_key,
                        quantize=settings.quantize,
                    )
                )
            jax.block_until_ready(loaded)
            seconds.append(time.perf_counter() - started_s)
            cpu_seconds = time.process_time() - started_cpu_s
            arrays_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
            after = _status_bytes()
            del loaded
    return {
        "first_seconds": seconds[0],
        "seconds": seconds[1],
        "cpu_seconds": cpu_seconds,
        "arrays_gib": arrays_bytes / GIB,
        "before_gib": before["VmRSS"] / GIB,
        "peak_gib": after["VmHWM"] / GIB,
        "peak_above_arrays_gib": (after["VmHWM"] - before["VmRSS"] - arrays_bytes) / GIB,
        "anonymous_above_arrays_gib": (highest["RssAnon"] - before["RssAnon"] - arrays_bytes) / GIB,
        "file_pages_gib": (highest["RssFile"] - before["RssFile"]) / GIB,
        "kept_above_arrays_gib": (after["VmRSS"] - before["VmRSS"] - arrays_bytes) / GIB,
    }


def _status_bytes() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = (line.split() for line in lines if line.startswith(("VmHWM", "VmRSS", "Rss")))
    return {name.removesuffix(":"): int(kib) * 1024 for name, kib, _ in fields}


@contextlib.contextmanager
def _sampled(interval_s: float = 0.005) -> Iterator[dict[str, int]]:
    """The largest values of the process's memory while the block runs, looked at so often."""
    highest = _status_bytes()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(interval_s):
            for name, size_bytes in _status_bytes().items():
                highest[name] = max(highest[name], size_bytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        ended.set()
        thread.join()


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{'':16s}{'GB/s':>7s}{'x disk':>8s}{'seconds':>9s}{'(first)':>9s}{'CPU':>7s}"
        f"{'above the arrays':>18s}"
        f"{'(anonymous':>12s}{'file)':>7s}"
    ]
    for name in MEASURED:
        row = result[name]
        line = (
            f"{name:16s}{row['gb_per_s']:7.2f}{result['ratio'].get(name, 1.0):8.2f}"
            f"{row['seconds']:9.2f}{row['first_seconds']:9.2f}"
        )
        if name != "disk":
            line += (
                f"{row['cpu_seconds']:7.2f}{row['peak_above_arrays_gib']:14.2f} GiB"
                f"{row['anonymous_above_arrays_gib']:12.2f}"
                f"{row['file_pages_gib']:7.2f}"
            )
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """The process of one load (used by `python -m tools.bench load`)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.load", allow_abbrev=False)
    parser.add_argument("name", choices=MEASURED)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--param-dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none")
    args = parser.parse_args()
    settings = Settings(args.param_dtype, args.quantize)
    print(json.dumps(measure(args.name, args.directory, settings)))


if __name__ == "__main__":
    main()
