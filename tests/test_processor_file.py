"""Where the image settings of a directory are: as transformers 5 writes them, and before it."""

import json
import shutil

import pytest
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import family_world as world
from uirl_jax import assets
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.llava import config as llava
from uirl_jax.families.qwen.images import ImageConfig

BASE = assets.find("asset:tiny-ui-base")
MEAN = [0.1, 0.2, 0.3]


@pytest.fixture
def llava_dir(tmp_path):
    return shutil.copytree(world.directory_of("llava"), tmp_path / "llava")


def save_llava_processor(directory):
    """What transformers 5 makes of a LLaVA's processor: one file."""
    side = {"height": 42, "width": 42}
    images = CLIPImageProcessorPil(size={"shortest_edge": 42}, crop_size=side, image_mean=MEAN)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    processor = transformers.LlavaProcessor(images, tokenizer, image_token="<|image_pad|>")
    processor.save_pretrained(directory)
    assert "image_processor" in json.loads((directory / "processor_config.json").read_text())


def test_processor_saved_by_transformers_5_is_read(llava_dir):
    (llava_dir / "preprocessor_config.json").unlink()
    save_llava_processor(llava_dir)
    assert llava.read_config(llava_dir).images == llava.ImageConfig(42, image_mean=tuple(MEAN))


@pytest.mark.parametrize("nested", [True, False, None])
def test_of_two_files_the_one_that_transformers_reads_holds(tmp_path, nested):
    old = Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 90_000})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old.to_dict()))
    new = Qwen2VLImageProcessorPil(image_mean=MEAN, max_pixels=300_000).to_dict()
    content = {"image_processor": new if nested else None}
    content = {} if nested is None else content
    text = json.dumps({"processor_class": "Qwen2VLProcessor", **content})
    (tmp_path / "processor_config.json").write_text(text)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    ours = ImageConfig.load(tmp_path)
    assert ours.image_mean == tuple(theirs.image_mean)
    bounds = (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (ours.min_pixels, ours.max_pixels) == bounds
    assert ours.max_pixels == (300_000 if nested else 90_000)


@pytest.mark.parametrize(
    "name", ["llava", "idefics2", "paligemma", "florence2", "windows", "plain"]
)
def test_no_image_settings_name_both_files(name, tmp_path):
    model_dir = shutil.copytree(world.directory_of(name), tmp_path / "model")
    (model_dir / "preprocessor_config.json").unlink()
    message = r"neither preprocessor_config\.json nor image_processor in processor_config\.json"
    with pytest.raises(ModelError, match=message):
        loading.load(model_dir, lora=None, seed=0)


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (5, "processor_config.json: image_processor=5, expected an object"),
        ({"size": 43}, r"processor_config.json: image_processor: squares of 43 pixels"),
        ({"size": [{}]}, r"processor_config.json: image_processor: image settings: size="),
    ],
)
def test_fault_of_the_nested_settings_names_them(llava_dir, nested, message):
    (llava_dir / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    with pytest.raises(ModelError, match=message) as error:
        llava.read_config(llava_dir)
    assert "\n" not in str(error.value)


def test_export_leaves_no_nested_settings_that_would_override_its_own(llava_dir, tmp_path):
    save_llava_processor(llava_dir)
    (llava_dir / "tokenizer.json").unlink()  # of another model
    policy = loading.load(llava_dir, lora=None, seed=0)
    out = tmp_path / "out"
    loading.save_merged(llava_dir, None, policy.trainable, out)
    theirs = LlavaImageProcessorPil.from_pretrained(out)
    assert theirs.do_pad and list(theirs.image_mean) == MEAN
    rest = json.loads((out / "processor_config.json").read_text())
    assert rest["image_token"] == "<|image_pad|>" and "image_processor" not in rest
    assert llava.read_config(out).images == policy.cfg.images
