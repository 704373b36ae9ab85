"""Checkpoints: exact, noticed when damaged, never lost to a kill, on whatever mesh."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from orbax.checkpoint import CheckpointManager

from uirl_jax.checkpoints import Checkpointer, array_format
from uirl_jax.errors import CheckpointError, CheckpointUnavailableError

ROOT = str(Path(__file__).parents[1])
META = {"cursor": {"consumed": ["a", "b"]}, "config": {"lr": 0.1, "clip": None}}


@jax.jit
def make_state(seed: int) -> dict[str, Any]:
    """A small learner's state, whose values depend on the seed."""
    init_key = jax.random.key(seed)
    lora = {
        "blocks": {
            "lora_a": jax.random.normal(init_key, (2, 8, 64)),
            "lora_b": jax.random.normal(init_key, (2, 64, 8)).astype(jnp.bfloat16),
        },
        "head": [jnp.full((3,), seed, jnp.float32), jnp.zeros((), jnp.float16)],
    }
    return {
        "lora": lora,
        "optimizer": optax.adamw(1e-3).init(lora),
        "step": jnp.asarray(seed, jnp.int32),
        "sample_key": jax.random.split(init_key, 3),
        "other_key": jax.random.key(seed, impl="rbg"),
        "old_key": jax.random.PRNGKey(seed),
        "mask": jnp.array([True, False]),
    }


ABSTRACT = jax.eval_shape(lambda: make_state(0))


def assert_same(got: Any, expected: Any) -> None:
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def steps_on_disk(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def flip_bit(file: Path, position: int, bit: int = 3) -> None:
    contents = bytearray(file.read_bytes())
    contents[position] ^= 1 << bit
    file.write_bytes(contents)


@pytest.fixture
def three_steps(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints"
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step), {**META, "step": step})
    return directory


def test_restore_latest_without_any_checkpoint_is_none(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.restore_latest(ABSTRACT) is None
    with Checkpointer(tmp_path / "missing", read_only=True) as checkpointer:
        assert checkpointer.restore_latest(ABSTRACT) is None
    assert not (tmp_path / "missing").exists()


def test_save_then_restore_in_a_new_checkpointer_is_exact(three_steps: Path) -> None:
    with Checkpointer(three_steps) as checkpointer:
        restored = checkpointer.restore_latest(ABSTRACT)
    assert restored.step == 3
    assert restored.meta == {**META, "step": 3}
    assert restored.skipped == []
    assert_same(restored.arrays, make_state(3))
    # Keys of every implementation draw what they would have drawn.
    for name in ("sample_key", "other_key"):
        expected = make_state(3)[name].reshape(-1)[0]
        got = restored.arrays[name].reshape(-1)[0]
        assert jax.random.bits(got) == jax.random.bits(expected)


def test_save_keeps_the_last_three_and_refuses_to_go_back(three_steps: Path) -> None:
    with Checkpointer(three_steps) as checkpointer:
        for step in (4, 7):
            checkpointer.save(step, make_state(step), META)
        assert checkpointer.steps() == [3, 4, 7] == steps_on_disk(three_steps)
        for step in (6, 7):
            with pytest.raises(CheckpointError, match=f"step {step} is not after the newest"):
                checkpointer.save(step, make_state(step), META)
        assert steps_on_disk(three_steps) == [3, 4, 7]


def test_save_keeps_every_so_many_for_good_and_continues_from_the_last(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_every=3) as checkpointer:
        for step in range(8):
            checkpointer.save(step, make_state(step), {**META, "step": step})
        assert steps_on_disk(tmp_path) == [0, 3, 6, 7]
        for step in (3, None):
            restored = checkpointer.restore(ABSTRACT, step)
            assert restored.step == restored.meta["step"] == (7 if step is None else step)
            assert_same(restored.arrays, make_state(restored.step))
        part = checkpointer.read_part("lora/", 3)
        assert part.step == 3 and set(part.arrays) == {
            *("blocks/lora_a", "blocks/lora_b", "head/0", "head/1"),
        }
        expected = make_state(3)["lora"]["blocks"]["lora_b"]
        assert part.arrays["blocks/lora_b"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(part.arrays["blocks/lora_b"], expected)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 4; there are 0, 3, 6, 7"):
            checkpointer.restore(ABSTRACT, 4)
    for step in (6, 7):  # a run goes on from the last two alone: the records of others are deleted
        (tmp_path / str(step) / "meta" / "metadata").write_text("{")
    with Checkpointer(tmp_path, keep=2, keep_every=3) as checkpointer:
        with pytest.raises(CheckpointError, match=r"are damaged .* with --resume_from"):
            checkpointer.restore_latest(ABSTRACT)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/6: is damaged"):
            checkpointer.restore(ABSTRACT, 6)
        newest = checkpointer.read_part("lora/", None)
    assert newest.step == 3 and len(newest.skipped) == 2


def test_save_without_waiting_is_committed_by_wait_and_survives_donation(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf - leaf, tree), donate_argnums=0)
    state = {"x": jnp.arange(1_000_000, dtype=jnp.float32), "y": jnp.ones((1000, 1000))}
    abstract = jax.eval_shape(lambda: state)
    expected = jax.tree.map(np.array, state)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state, META, wait=False)
        overwrite(state)["x"].block_until_ready()
        checkpointer.wait()
        assert steps_on_disk(directory) == [1]
        assert_same(checkpointer.restore_latest(abstract).arrays, expected)


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": object()}])
def test_save_of_meta_that_is_no_json_writes_nothing(tmp_path: Path, meta: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises((ValueError, TypeError)):
        checkpointer.save(1, make_state(1), meta)
    assert list(tmp_path.iterdir()) == []


def test_restore_after_any_flipped_bit_is_exact_or_falls_back(three_steps: Path) -> None:
    files = [file for file in sorted((three_steps / "3").rglob("*")) if file.stat().st_size]
    files = [file for file in files if file.is_file()]
    rng = random.Random(0)
    reasons = []
    for file in files:
        original = file.read_bytes()
        for _ in range(3):
            flip_bit(file, rng.randrange(len(original)), rng.randrange(8))
            with Checkpointer(three_steps, read_only=True) as checkpointer:
                restored = checkpointer.restore_latest(ABSTRACT)
            assert_same(restored.arrays, make_state(restored.step))
            assert restored.meta == {**META, "step": restored.step}
            if restored.step != 3:
                assert restored.step == 2
                reasons += restored.skipped
            file.write_bytes(original)
    assert all(reason.startswith(f"{three_steps}/3: ") for reason in reasons)
    assert all("\n" not in reason and len(reason) < 500 for reason in reasons)


def test_restore_after_a_flipped_bit_that_leaves_the_json_readable_falls_back(
    three_steps: Path,
) -> None:
    """The list ["a", "b"] becomes ["c", "b"]: JSON like any other, but for its checksum."""
    file = three_steps / "3" / "meta" / "metadata"
    flip_bit(file, file.read_bytes().index(b'["a", "b"]') + 2, bit=1)
    with Checkpointer(three_steps, read_only=True) as checkpointer:
        restored = checkpointer.restore_latest(ABSTRACT)
    assert restored.step == 2
    assert "checksum of its JSON item" in restored.skipped[0]


def test_restore_after_a_flipped_bit_in_array_data_falls_back(tmp_path: Path) -> None:
    """Random bytes do not compress, are stored as they are: nobody else would notice."""
    state = {"noise": np.random.default_rng(0).bytes(1 << 16), "small": b"\0" * 8}
    state = {name: np.frombuffer(data, np.uint8) for name, data in state.items()}
    abstract = jax.eval_shape(lambda: state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, META)
        checkpointer.save(2, state, META)
    sizes = {file.stat().st_size: file for file in (tmp_path / "2").rglob("*") if file.is_file()}
    contents = sizes[max(sizes)].read_bytes()
    flip_bit(sizes[max(sizes)], contents.index(state["noise"].tobytes()[1000:1100]) + 50)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        restored = checkpointer.restore_latest(abstract)
        damage = f"{tmp_path}/2: checksum of 1 arrays does not match, first noise"
        with pytest.raises(CheckpointError, match=f"^{damage}$"):
            checkpointer.restore(abstract, 2)  # asked for by its step: nothing falls back
    assert restored.step == 1
    assert_same(restored.arrays, state)
    assert restored.skipped == [damage]


def empty(step: Path) -> None:
    for path in step.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncate_all(step: Path) -> None:
    for file in step.rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)


def drop_data(step: Path) -> None:
    shutil.rmtree(step / "arrays" / "d")


def drop_meta(step: Path) -> None:
    shutil.rmtree(step / "meta")


def another_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.parent / "1", step)


def edited_meta(step: Path) -> None:
    file = step / "meta" / "metadata"
    item = json.loads(file.read_text())
    item["meta"]["cursor"]["consumed"].append("c")
    file.write_text(json.dumps(item))


def foreign_metadata(step: Path) -> None:
    """Orbax raises a KeyError."""
    (step / "arrays" / "_METADATA").write_text('{"a": 1}')


DAMAGES = [empty, truncate_all, drop_data, drop_meta, another_step, edited_meta, foreign_metadata]


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_past_a_damaged_newest_step_falls_back_and_goes_on(
    three_steps: Path, damage: Any
) -> None:
    damage(three_steps / "3")
    with Checkpointer(three_steps, read_only=True) as checkpointer:
        assert checkpointer.restore_latest(ABSTRACT).step == 2
    assert steps_on_disk(three_steps) == [1, 2, 3]  # a reader moves nothing

    with Checkpointer(three_steps) as checkpointer:
        restored = checkpointer.restore_latest(ABSTRACT)
        assert restored.step == 2
        assert_same(restored.arrays, make_state(2))
        assert [reason.split(": ")[0] for reason in restored.skipped] == [f"{three_steps}/3"]
        assert checkpointer.steps() == [1, 2]
        assert [path.name.split("-")[0] for path in (three_steps / "damaged").iterdir()] == ["3"]
        checkpointer.save(3, make_state(33), META)
        checkpointer.save(4, make_state(4), META)
    with Checkpointer(three_steps) as checkpointer:
        assert checkpointer.steps() == [2, 3, 4]
        restored = checkpointer.restore_latest(ABSTRACT)
        assert (restored.step, restored.skipped) == (4, [])
        assert_same(restored.arrays, make_state(4))


@pytest.mark.parametrize("damage", DAMAGES)
def test_part_of_a_damaged_step_falls_back_or_is_one_error(three_steps: Path, damage: Any) -> None:
    damage(three_steps / "3")
    with Checkpointer(three_steps, read_only=True) as checkpointer:
        part = checkpointer.read_part("lora/", None)
        assert part.step == 2
        assert [reason.split(": ")[0] for reason in part.skipped] == [f"{three_steps}/3"]
        with pytest.raises(CheckpointError, match=f"^{three_steps}/3: ") as caught:
            checkpointer.read_part("lora/", 3)
        assert "\n" not in str(caught.value)
    for step, other in ((1, drop_meta), (2, foreign_metadata)):
        other(three_steps / str(step))
    with (
        Checkpointer(three_steps, read_only=True) as checkpointer,
        pytest.raises(CheckpointError, match="no checkpoint yet; ") as caught,
    ):
        checkpointer.read_part("lora/", None)
    assert all(f"{three_steps}/{step}: " in str(caught.value) for step in (1, 2, 3))


def test_restore_with_all_steps_damaged_raises_and_moves_nothing(three_steps: Path) -> None:
    for step, damage in zip((1, 2, 3), (truncate_all, drop_meta, empty), strict=True):
        damage(three_steps / str(step))
    with Checkpointer(three_steps) as checkpointer:
        for _ in range(2):  # nor does trying again start from nothing
            with pytest.raises(CheckpointError, match="all checkpoints are damaged") as caught:
                checkpointer.restore_latest(ABSTRACT)
            assert all(f"step {step}: " in str(caught.value) for step in (1, 2, 3))
            assert "\n" not in str(caught.value)
    assert steps_on_disk(three_steps) == [1, 2, 3]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE])
def test_error_that_is_not_of_the_files_takes_no_checkpoint_for_damaged(
    three_steps: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    with Checkpointer(three_steps) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointManager, "restore", fail)
            for read in (
                lambda: checkpointer.restore_latest(ABSTRACT),
                lambda: checkpointer.restore(ABSTRACT, 2),
                lambda: checkpointer.read_part("lora/", None),
            ):
                with pytest.raises(CheckpointUnavailableError, match=os.strerror(number)) as caught:
                    read()
                assert caught.value.exit_code == 75
        assert checkpointer.restore_latest(ABSTRACT).step == 3
    assert steps_on_disk(three_steps) == [1, 2, 3]


def test_restore_into_another_config_says_which_arrays(three_steps: Path) -> None:
    wanted = {**ABSTRACT, "lora": {**ABSTRACT["lora"], "blocks": {}}}
    wanted["value_head"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    wanted["step"] = jax.ShapeDtypeStruct((), jnp.int8)
    with Checkpointer(three_steps) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.restore_latest(wanted)
    message = str(caught.value)
    assert message.startswith(f"{three_steps}/3: 4 arrays do not fit this config: ")
    assert "value_head is missing" in message
    assert "lora/blocks/lora_a is unknown" in message
    assert "step is int32[], expected int8[]" in message
    assert steps_on_disk(three_steps) == [1, 2, 3]  # it is no damage


def test_restore_of_a_newer_format_is_refused(three_steps: Path) -> None:
    file = three_steps / "3" / "meta" / "metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    refused = pytest.raises(CheckpointError, match="format 2, this program reads 1")
    with Checkpointer(three_steps) as checkpointer, refused:
        checkpointer.restore_latest(ABSTRACT)


def run_python(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


ON_A_MESH = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from uirl_jax.checkpoints import Checkpointer

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = {"matrix": P("data", "model"), "row": P("model"), "key": P()}
abstract = {
    "matrix": jax.ShapeDtypeStruct((8, 16), np.float32),
    "row": jax.ShapeDtypeStruct((16,), "bfloat16"),
    "key": jax.eval_shape(jax.random.key, 0),
}
abstract = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs[name]))
    for name, leaf in abstract.items()
}
with Checkpointer(sys.argv[1]) as checkpointer:
    restored = checkpointer.restore_latest(abstract)
    arrays = restored.arrays
    assert arrays["matrix"].sharding == abstract["matrix"].sharding
    assert arrays["matrix"].addressable_shards[0].data.shape == (4, 4)
    assert len(arrays["row"].sharding.device_set) == 8
    assert np.array_equal(arrays["matrix"], np.arange(128, dtype=np.float32).reshape(8, 16))
    doubled = {**arrays, "matrix": arrays["matrix"] * 2}
    checkpointer.save(restored.step + 1, doubled, {})
"""


def test_restore_onto_another_mesh_and_back_is_exact(tmp_path: Path) -> None:
    state = {
        "matrix": jnp.arange(128, dtype=jnp.float32).reshape(8, 16),
        "row": jnp.arange(16, dtype=jnp.bfloat16) / 3,
        "key": jax.random.key(5),
    }
    abstract = jax.eval_shape(lambda: state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
    flags = "--xla_force_host_platform_device_count=8"
    done = run_python(ON_A_MESH, str(tmp_path), XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(abstract)
    assert restored.step == 2
    assert_same(restored.arrays, {**state, "matrix": state["matrix"] * 2})


SAVE_FOREVER = """
import sys
import numpy as np
from uirl_jax.checkpoints import Checkpointer

with Checkpointer(sys.argv[1]) as checkpointer:
    for step in range((checkpointer.steps() or [0])[-1] + 1, 1_000_000):
        arrays = {f"leaf{i}": np.full((50, 50), step * 100 + i, np.float32) for i in range(10)}
        checkpointer.save(step, arrays, {"step": step})
        print(step, flush=True)
"""


def test_learner_killed_while_saving_loses_no_committed_checkpoint(tmp_path: Path) -> None:
    abstract = {f"leaf{i}": jax.ShapeDtypeStruct((50, 50), np.float32) for i in range(10)}
    rng = random.Random(1)
    saw_leftovers = 0
    for kill in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT},
            stdout=subprocess.PIPE,
            text=True,
        )
        acknowledged = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 5))][-1]
        # Somewhere in the save after it, which takes 50 ms.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(0, 0.05))
        process.kill()
        acknowledged = ([acknowledged] + [int(line) for line in process.stdout])[-1]
        process.stdout.close()
        process.wait()
        saw_leftovers += any("tmp" in path.name for path in tmp_path.iterdir())
        with Checkpointer(tmp_path, read_only=True) as checkpointer:
            restored = checkpointer.restore_latest(abstract)
        assert restored.skipped == [], kill
        assert restored.step >= acknowledged
        assert restored.meta == {"step": restored.step}
        for i in range(10):
            assert np.all(restored.arrays[f"leaf{i}"] == restored.step * 100 + i)
    assert saw_leftovers > 0  # the kills did come in the middle of saves
    # The next learner takes the leftovers away.
    with Checkpointer(tmp_path) as checkpointer:
        arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        checkpointer.save(restored.step + 1, arrays, {})
        assert len(checkpointer.steps()) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_save_with_too_little_space_is_refused_before_writing(
    three_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(three_steps)
    with Checkpointer(three_steps) as checkpointer:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4 << 20))
        with pytest.raises(
            CheckpointError, match=r"step 4 was not saved: .*no space left"
        ) as caught:
            checkpointer.save(4, make_state(4), META)
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in three_steps.iterdir()) == ["1", "2", "3"]
        monkeypatch.undo()
        checkpointer.save(4, make_state(4), META)
        assert checkpointer.restore_latest(ABSTRACT).step == 4


# A limit on the size of files is what a full disk looks like in the middle of a write.
FULL_DISK = """
import resource, sys
import jax, numpy as np
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import CheckpointError, CheckpointUnavailableError

small = {"x": np.arange(100.0, dtype=np.float32)}
big = {"x": np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)}
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, small, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
for wait in (True, False):
    try:
        checkpointer.save(2, big, {}, wait=wait)
        checkpointer.wait()
    except CheckpointError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
restored = checkpointer.restore_latest(jax.eval_shape(lambda: small))
assert restored.step == 1 and restored.skipped == [], restored
assert np.array_equal(restored.arrays["x"], small["x"])
checkpointer.save(2, small, {})
assert checkpointer.restore_latest(jax.eval_shape(lambda: small)).step == 2
checkpointer.close()
"""


def test_save_on_a_disk_that_fills_up_is_one_line_and_leaves_the_last_good_one(
    tmp_path: Path,
) -> None:
    done = run_python(FULL_DISK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    assert all(line.startswith(f"{tmp_path}: step 2 was not saved: ") for line in lines)
    assert "File too large" in lines[0]
    # Orbax and tensorstore alone print pages of these.
    assert "ERROR" not in done.stderr
    assert "Traceback" not in done.stderr


def test_read_only_never_saves(three_steps: Path) -> None:
    with Checkpointer(three_steps, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match="opened read-only"):
            checkpointer.save(4, make_state(4), META)
        assert_same(checkpointer.restore_latest(ABSTRACT).arrays, make_state(3))


def test_temporary_directories_are_taken_away_by_the_learner_only(three_steps: Path) -> None:
    leftover = three_steps / "9.orbax-checkpoint-tmp"
    leftover.mkdir()
    with Checkpointer(three_steps, read_only=True) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.restore_latest(ABSTRACT).step == 3
        assert leftover.exists()
    with Checkpointer(three_steps) as checkpointer:
        checkpointer.save(4, make_state(4), META)
        assert not leftover.exists()


def test_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_checksum_covers_bfloat16_and_order() -> None:
    values = np.linspace(-2, 2, 12).reshape(3, 4)
    as_bfloat16 = values.astype(ml_dtypes.bfloat16)
    assert array_format.crc32c(jnp.asarray(as_bfloat16)) == array_format.crc32c(as_bfloat16)
    assert array_format.crc32c(values.T) == array_format.crc32c(np.ascontiguousarray(values.T))
    assert array_format.crc32c(values.T) != array_format.crc32c(values)
