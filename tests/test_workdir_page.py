"""The programs of docs/workdir.md, run as they stand there, on files that a run writes."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tests.sample_trajectories import make_trajectory, make_writer
from uirl_jax.checkpoints import Checkpointer

PAGE = Path(__file__).parents[1] / "docs" / "workdir.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_checkpoint_is_restored_by_orbax_alone(tmp_path):
    adapters = {"lora_a": jnp.arange(6.0).reshape(2, 3), "lora_b": jnp.ones((3,), jnp.bfloat16)}
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(7, {"trainable": adapters, "step": jnp.array(7)}, {"cursor": [1, 2]})
    names = {"workdir": tmp_path}
    exec(compile(PROGRAMS[0], str(PAGE), "exec"), names)
    assert names["step"] == 7 and names["restored"]["meta"]["meta"] == {"cursor": [1, 2]}
    assert names["adapters"].keys() == {"trainable/lora_a", "trainable/lora_b"}
    for name, array in adapters.items():
        np.testing.assert_array_equal(names["adapters"][f"trainable/{name}"], array)


def test_shard_is_read_by_a_tfrecord_library(tmp_path):
    trajectory = make_trajectory()
    shard = make_writer(tmp_path).publish([trajectory])
    names = {"shard": str(shard)}
    exec(compile(PROGRAMS[1], str(PAGE), "exec"), names)
    assert names["instruction"] == trajectory.instruction
    assert names["screenshots"] == list(trajectory.images.values())
    feature = names["feature"]  # of the last record
    assert feature["kind"].bytes_list.value[0] == b"footer"
    assert len(PROGRAMS) == 2
