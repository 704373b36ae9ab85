"""The files of a model directory that contradict each other or are hostile: one ModelError each."""

import json
import shutil

import pytest
from safetensors.numpy import save_file

import uirl_jax
from tests import tiny_model
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.models import weight_files, weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("base"))


@pytest.fixture
def model_dir(base, tmp_path):
    return shutil.copytree(base, tmp_path / "model")


def check(path):
    return loading.check(family_of(path), path, lora=None)


def change_tokenizer(model_dir, change):
    path = model_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------ ids beyond the embeddings


def add_token(content, token_id):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


@pytest.mark.parametrize("part", ["added_tokens", "vocab"])
def test_token_beyond_the_embeddings_is_refused(model_dir, part):
    rows = check(model_dir).cfg.vocab_size

    def change(content):
        if part == "vocab":
            content["model"]["vocab"]["<new>"] = rows
        else:
            content["added_tokens"].append(add_token("<new>", rows))

    change_tokenizer(model_dir, change)
    message = f"1 tokens, such as '<new>', have ids beyond the {rows} rows.*tools.add_point_tokens"
    with pytest.raises(ModelError, match=message):
        check(model_dir)


def test_placeholder_beyond_the_embeddings_is_taken(model_dir):
    """Florence-2's is: its row is never read."""
    rows = check(model_dir).cfg.vocab_size

    def change(content):
        for token in content["added_tokens"]:
            if token["content"] == "<|image_pad|>":
                token["id"] = rows

    change_tokenizer(model_dir, change)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"image_token_id": rows}))
    check(model_dir)


# ----------------------------------------------------------------------- saving into the base


@pytest.mark.parametrize("kind", ["itself", "link", "linked files"])
def test_model_saved_into_its_own_directory_is_refused_and_unchanged(model_dir, tmp_path, kind):
    target = model_dir if kind == "itself" else tmp_path / "target"
    if kind == "link":
        target.symlink_to(model_dir)
    elif kind == "linked files":
        target.mkdir()
        (target / "tokenizer.json").symlink_to(model_dir / "tokenizer.json")
    before = {file.name: file.read_bytes() for file in model_dir.iterdir()}
    vlm = uirl_jax.VLM.from_pretrained(model_dir)
    with pytest.raises(ModelError, match="save into another directory"):
        vlm.save_pretrained(target)
    assert {file.name: file.read_bytes() for file in model_dir.iterdir()} == before


# ------------------------------------------------------------------------------------ hostile files


def without_added_tokens(content):
    vocab = content["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in content["added_tokens"]}
    content["added_tokens"] = []


def with_a_number(content):
    content["added_tokens"] = 5


def with_a_list_as_name(content):
    content["added_tokens"][0]["content"] = []


@pytest.mark.parametrize(
    "change", [without_added_tokens, with_a_number, with_a_list_as_name], ids=lambda f: f.__name__
)
def test_tokenizer_without_usable_added_tokens_is_a_model_error(model_dir, change):
    change_tokenizer(model_dir, change)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        check(model_dir)
        Chat(model_dir, ChatConfig(), family_of(model_dir).chat)


NESTED = "[" * 200_000


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "tokenizer.json", "uirl_chat.json"]
)
def test_deeply_nested_file_is_a_model_error(model_dir, name):
    (model_dir / name).write_text(NESTED)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        check(model_dir)
        ChatConfig().completed(model_dir)


def test_deeply_nested_index_is_a_model_error(model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(NESTED)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        weight_files.paths_in(model_dir)


def test_weights_without_tensors_are_a_model_error(model_dir):
    save_file({}, model_dir / "model.safetensors")
    with pytest.raises(ModelError, match="hold no tensors"):
        weights.stored_dtype(model_dir)
