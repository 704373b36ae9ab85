"""Base weights to Orbax and back: the same bits, on one device and eight, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests import family_world, tiny_model
from tests.eight_devices import on_eight_devices
from tools import convert
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.models import sharding, weights

PAGE = Path(__file__).parents[1] / "docs" / "tools.md"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def converted(model_dir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("orbax") / "checkpoint"
    assert run("to-orbax", model_dir, f"--out={out}") == 0
    return out


@pytest.fixture
def checkpoint(converted, tmp_path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(converted, tmp_path / "checkpoint")


def run(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def published(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, by the name of the family's table."""
    table = convert.family_of(directory).weights
    found = {}
    for file in directory.glob("*.safetensors"):
        for name, array in safetensors.numpy.load_file(file).items():
            if (known := table.published_name(name)) is not None:
                found[known] = array
    return found


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].tobytes() == array.tobytes(), name


def test_round_trip_gives_the_same_files(model_dir, converted, tmp_path, capsys):
    out, told = tmp_path / "model", tmp_path / "told.json"
    assert run("to-hf", converted, f"--out={out}", f"--json={told}") == 0
    for file in model_dir.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert weights.base_hash(out) == weights.base_hash(model_dir)
    content = json.loads(told.read_text())
    assert f"{out}: {content['leaves']} leaves" in capsys.readouterr().out
    assert content["size_bytes"] == sum(file.stat().st_size for file in out.iterdir())


@pytest.mark.parametrize("name", ["windows", "plain", "paligemma", "florence2", "llava"])
def test_round_trip_of_other_families_keeps_every_bit(tmp_path, name):
    """Directories that transformers wrote: with other names, and with tensors that are repeated."""
    source = family_world.directory_of(name)
    assert run("to-orbax", source, f"--out={tmp_path / 'orbax'}") == 0
    assert run("to-hf", tmp_path / "orbax", f"--out={tmp_path / 'model'}") == 0
    family = convert.family_of(source)
    expected = published(source)
    for redundant in family.weights.redundant(family.read_config(source)):
        expected.pop(redundant, None)
    assert_same_bits(published(tmp_path / "model"), expected)
    assert (tmp_path / "model" / "config.json").read_bytes() == (
        source / "config.json"
    ).read_bytes()


def test_each_leaf_keeps_the_dtype_of_its_files(model_dir, tmp_path):
    source = shutil.copytree(model_dir, tmp_path / "source")
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    for name, array in tensors.items():
        if "norm" not in name:
            tensors[name] = array.astype(jnp.bfloat16)
    one = next(name for name in tensors if re.search(r"layers\.1\.mlp\.up_proj", name))
    tensors[one] = tensors[one].astype(np.float32)  # of one layer of a stacked leaf
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    assert run("to-orbax", source, f"--out={tmp_path / 'orbax'}") == 0
    assert run("to-hf", tmp_path / "orbax", f"--out={tmp_path / 'model'}") == 0
    got = published(tmp_path / "model")
    kinds = {array.dtype.name for array in got.values()}
    assert kinds == {"float32", "bfloat16"}
    for name, array in published(source).items():
        wider = "up_proj" in name
        assert got[name].dtype == (np.float32 if wider else array.dtype), name
        np.testing.assert_array_equal(got[name].astype(np.float32), array.astype(np.float32))


def test_loaded_model_is_the_one_of_the_directory(model_dir, converted):
    base = convert.load(converted)
    loaded = loading.load(model_dir, lora=None, seed=0)
    expected = weights.adapters_to_numpy(loaded.trainable)
    got = weights.adapters_to_numpy(convert.nnx.state(base.model))
    assert_same_bits(got, expected)


def on_a_mesh() -> None:
    """Eight devices: written from one mesh, restored onto another, and back to the same files."""
    import tempfile

    assert len(jax.devices()) == 8
    root = Path(tempfile.mkdtemp())
    model_dir = tiny_model.write(root / "source")
    assert run("to-orbax", model_dir, f"--out={root / 'orbax'}", "--mesh=1,8,1") == 0
    mesh = sharding.make_mesh(2, 2, 2)
    base = convert.load(root / "orbax", mesh)
    state = convert.nnx.state(base.model)
    wanted = sharding.state_shardings(mesh, state, base.family.weights.sharding_rules)
    split = 0
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        split += leaf.addressable_shards[0].data.size < leaf.size
    assert split > 5
    assert run("to-hf", root / "orbax", f"--out={root / 'back'}", "--mesh=2,2,2") == 0
    one, other = (folder / "model.safetensors" for folder in (root / "back", model_dir))
    assert one.read_bytes() == other.read_bytes()
    shutil.rmtree(root)


def test_checkpoint_is_restored_onto_another_mesh_of_eight_devices():
    process = on_eight_devices("on_a_mesh", "test_convert")
    assert process.returncode == 0, process.stderr[-2000:]


def test_program_of_the_page_reads_it_with_orbax_alone(model_dir, converted):
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "uirl" not in program.replace("uirl_weights", "")
    names = {"checkpoint": str(converted)}
    exec(compile(program, str(PAGE), "exec"), names)
    kernel = names["leaves"]["text/blocks/q_proj/kernel"]
    tensors = safetensors.numpy.load_file(model_dir / "model.safetensors")
    [first] = [a for n, a in tensors.items() if n.endswith("layers.0.self_attn.q_proj.weight")]
    np.testing.assert_array_equal(np.asarray(kernel[0]), first.T)


def flipped_bit(checkpoint: Path) -> None:
    """In the largest file of arrays."""
    file = max(
        (f for f in checkpoint.rglob("*/d/*") if f.is_file()), key=lambda f: f.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def change(name: str, **fields: object):
    def apply(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        for key, value in fields.items():
            content[key] = value(content[key]) if callable(value) else value
        (checkpoint / name).write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: (c / "uirl_weights.json").unlink(), "has no uirl_weights.json; expected a dir"),
        (lambda c: (c / "uirl_weights.json").write_text("[1"), "cannot be read as JSON"),
        (change("uirl_weights.json", format=9), "format 9, this version reads 1"),
        (change("uirl_weights.json", dtypes=lambda d: {**d, "x": "int8"}), "dtypes must name one"),
        (change("uirl_weights.json", dtypes=lambda d: {**d, "\n": "float32"}), "unexpected ?"),
        (change("uirl_weights.json", dtypes={}), "missing text/"),
        (change("uirl_weights.json", model_type="\x1bother"), r"weights of '\x1bother'"),
        (change("config.json", num_hidden_layers=3), "checkpoint"),
        (change("config.json", model_type="llama"), "llama"),
        (lambda c: shutil.rmtree(c / "weights"), "no Orbax checkpoint of step 0"),
        (lambda c: shutil.rmtree(c / "weights" / "0" / "arrays"), "convert the model directory"),
        (lambda c: shutil.rmtree(c / "weights" / "0" / "meta"), "convert the model directory"),
        (flipped_bit, "convert the model directory again"),
        (lambda c: (c / "config.json").unlink(), "config.json"),
    ],
)
def test_what_is_no_checkpoint_of_that_model_is_one_line(
    checkpoint, tmp_path, capsys, damage, said
):
    damage(checkpoint)
    assert run("to-hf", checkpoint, f"--out={tmp_path / 'model'}") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert said in error and "\x1b" not in error
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["to-orbax", "nowhere"], "no model in Hugging Face's format"),
        (["to-orbax", "."], "config.json"),
        (["to-hf", "."], "has no uirl_weights.json"),
        (["to-orbax", ".", "--mesh=8"], "--mesh=8: expected data,fsdp,model"),
        (["to-orbax", ".", "--mesh=64,64,64"], "devices"),
        (["to-orbax", ".", "--family=nothing"], "nothing"),
    ],
)
def test_wrong_argument_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments, "--out=out") == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    assert run(*arguments, "--out=there") == 1
    assert "is there already" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_refused(model_dir, tmp_path, capsys):
    source = shutil.copytree(model_dir, tmp_path / "source")
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    tensors.pop("model.norm.weight")
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    assert run("to-orbax", source, f"--out={tmp_path / 'orbax'}") == 1
    assert "missing model.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "orbax").exists()


def test_run_does_not_take_a_checkpoint_as_its_model(converted):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        loading.load(converted, lora=None, seed=0)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        convert.main(["--help"])
    assert ended.value.code == 0
    assert "python -m tools.convert to-hf checkpoint --out=model" in capsys.readouterr().out
