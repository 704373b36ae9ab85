"""tools.average_models: the mean of models, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy's bfloat16, in which weights are stored)
import numpy as np
import pytest
import safetensors.numpy

from tests.family_world import change
from tools import average_models
from uirl_jax.vlm import VLM

BASE = Path("uirl_jax/assets/tiny-ui-base")


def run(*arguments: object) -> int:
    return average_models.main([str(argument) for argument in arguments])


def changed(directory: Path, seed: int) -> Path:
    """The tiny base with other weights."""
    shutil.copytree(BASE, directory)
    tensors = safetensors.numpy.load_file(BASE / "model.safetensors")
    rng = np.random.default_rng(seed)
    for name, array in tensors.items():
        noise = rng.normal(0, 0.1, array.shape).astype(np.float32)
        tensors[name] = (array.astype(np.float32) + noise).astype(array.dtype)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return [changed(folder / str(seed), seed) for seed in range(3)]


def test_mean_is_that_of_float64_within_one_rounding(three, tmp_path, capsys):
    assert run(*three, f"--out={tmp_path / 'mean'}") == 0
    found = safetensors.numpy.load_file(tmp_path / "mean/model.safetensors")
    loaded = [safetensors.numpy.load_file(path / "model.safetensors") for path in three]
    assert capsys.readouterr().out == (
        f"{tmp_path / 'mean'}: {len(loaded[0])} tensors, the mean of 3 models\n"
    )
    assert found.keys() == loaded[0].keys()
    for name, array in found.items():
        mean = np.mean([one[name].astype(np.float64) for one in loaded], 0)
        assert array.dtype == loaded[0][name].dtype, name
        # bfloat16 has 8 bits: half of the last is 2**-8 of 1. The sum of three rounds in float32.
        error = np.abs(array.astype(np.float64) - mean)
        assert np.all(error <= 2**-8 * np.abs(mean) + 2**-22), name
    for path in BASE.iterdir():
        if path.name not in ("model.safetensors", "README.md"):
            assert (tmp_path / "mean" / path.name).read_bytes() == path.read_bytes()
    VLM.from_pretrained(tmp_path / "mean")


def test_models_cut_into_other_files_have_the_same_mean(three, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(three[1], cut)
    (cut / "model.safetensors").unlink()
    tensors = safetensors.numpy.load_file(three[1] / "model.safetensors")
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        part = {name: tensors[name] for name in names}
        safetensors.numpy.save_file(part, cut / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(three[0], three[1], f"--out={tmp_path / 'whole'}") == 0
    assert run(cut, three[0], f"--out={tmp_path / 'of_cut'}") == 0
    whole = safetensors.numpy.load_file(tmp_path / "whole/model.safetensors")
    files = sorted(path.name for path in (tmp_path / "of_cut").glob("*.safetensors"))
    assert files == ["model-0.safetensors", "model-1.safetensors"]
    parts = [safetensors.numpy.load_file(tmp_path / "of_cut" / file) for file in files]
    assert parts[0].keys() == set(sorted(tensors)[::2])
    for name, array in (parts[0] | parts[1]).items():
        assert np.array_equal(array.view(np.uint16), whole[name].view(np.uint16)), name
    VLM.from_pretrained(tmp_path / "of_cut")


def other_tensors(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    first, second, *_ = sorted(tensors)
    tensors[first] = tensors[first][:1]
    del tensors[second]
    safetensors.numpy.save_file(tensors, path)


def integers(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors[min(tensors)] = tensors[min(tensors)].astype(np.int8)
    safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            other_tensors,
            r"differs from .* has shape \(1,.* where the first has \(\d+,.* has shape none where",
        ),
        (integers, "is I8; a mean is taken of float32, bfloat16, float16"),
        (lambda d: change(d / "config.json", vocab_size=500), "another config.json"),
        (lambda d: change(d / "preprocessor_config.json", patch_size=8), "preprocessor_config"),
        (lambda d: (d / "uirl_chat.json").unlink(), "another uirl_chat.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "another tokenizer.json"),
        (lambda d: (d / "model.safetensors").write_bytes(b"no"), "not a complete safetensors file"),
        (shutil.rmtree, "is no directory; expected a model in Hugging Face's format"),
    ],
)
def test_other_models_are_refused_and_nothing_is_left(three, tmp_path, capsys, spoil, message):
    other = tmp_path / "other"
    shutil.copytree(three[1], other)
    spoil(other)
    assert run(three[0], other, f"--out={tmp_path / 'mean'}") > 0
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert re.search(message, error), error
    assert {path.name for path in tmp_path.iterdir()} <= {"other"}


def test_what_wrote_a_config_may_differ(three, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(three[1], other)
    change(other / "config.json", transformers_version="9", torch_dtype="float32")
    assert run(three[0], other, f"--out={tmp_path / 'mean'}") == 0


def test_one_model_or_a_folder_in_use_are_refused(three, tmp_path, capsys):
    assert run(three[0], f"--out={tmp_path / 'mean'}") > 0
    assert "give two or more" in capsys.readouterr().err
    (tmp_path / "mean").mkdir()
    assert run(*three, f"--out={tmp_path / 'mean'}") > 0
    assert "is there already; give a new directory" in capsys.readouterr().err
    assert not any((tmp_path / "mean").iterdir())
