"""The prompts that travel with a model: written, read, completed, and the same in transformers."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.policies import screen_of
from tools.base_models import qwen_tokenizer
from uirl_jax.errors import ModelError
from uirl_jax.families import chat_config, qwen2_vl
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig

LAYOUT = qwen2_vl.FAMILY.chat
OWN = ChatConfig(
    action_format="json",
    coordinates="0-1000",
    system_prompt='You click.\nSay "{}" — 漢 \\ {% if %}.',
    prompt_template="Do this: {instruction}!",
)


@pytest.fixture
def model_dir(tmp_path):
    """A model directory whose tokenizer has another default system prompt."""
    tokenizer = qwen_tokenizer.train_tokenizer(["Do this: click the button"] * 9, 300)
    qwen_tokenizer.save(tokenizer, tmp_path, system_prompt="You are a helpful assistant.")
    return tmp_path


def test_written_config_completes_what_another_leaves_out(tmp_path):
    chat_config.write(tmp_path, OWN, LAYOUT)
    assert ChatConfig().completed(tmp_path) == OWN
    assert ChatConfig(max_screenshots=7).completed("", tmp_path / "none", tmp_path) == (
        ChatConfig("json", "0-1000", OWN.system_prompt, OWN.prompt_template, max_screenshots=7)
    )
    given = ChatConfig(system_prompt="", coordinates="0-1").completed(tmp_path)
    assert given == ChatConfig("json", "0-1", "", OWN.prompt_template)
    # Prompts of another format say nothing about this one.
    other = ChatConfig(action_format="text")
    assert other.completed(tmp_path) == other
    assert ChatConfig().completed(tmp_path / "none") == ChatConfig()


def test_written_prompts_are_those_of_the_format_in_full(tmp_path):
    chat_config.write(tmp_path, ChatConfig(action_format="computer_use"), LAYOUT)
    found = chat_config.read(tmp_path)
    assert found["coordinates"] == "image" and "{width}x{height}" in found["system_prompt"]
    # A template does not know the screen's size: a default with a hole in it would be wrong.
    assert [path.name for path in tmp_path.iterdir()] == ["uirl_chat.json"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("system_prompt", [OWN.system_prompt, ""])
def test_written_template_renders_the_runs_own_context(model_dir, system_prompt, older):
    cfg = ChatConfig("text", "", system_prompt, OWN.prompt_template)
    if older:  # as files were before chat_template.jinja
        (model_dir / "chat_template.jinja").unlink()
    screen = screen_of("a", (1, 4, 6))
    context = Chat(model_dir, cfg, LAYOUT).context("click the button", [screen], [])
    text = "Do this: click the button!"
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}

    def rendered() -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        shown = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        image = "<|image_pad|>"
        return tokenizer(shown.replace(image, image * screen.tokens))["input_ids"]

    assert rendered() != context.ids.tolist()
    chat_config.write(model_dir, cfg, LAYOUT)
    np.testing.assert_array_equal(rendered(), context.ids)
    if older:
        (model_dir / "chat_template.jinja").unlink()
        np.testing.assert_array_equal(rendered(), context.ids)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"action_format": "text"}', "expected the texts action_format, coordinates"),
        ({"system_prompt": 3}, "expected the texts"),
        ({"action_format": "fly"}, "'fly', expected one of text"),
        ({"coordinates": "inches"}, "inches"),
        ({"prompt_template": "Go"}, "lacks {instruction}"),
        ({"more": "x"}, "and nothing else"),
        ({"system_prompt": "x" * 2_000_000}, "more than 1000000 bytes"),
    ],
)
def test_file_that_is_not_valid_is_one_error_with_its_path(tmp_path, content, reason):
    path = tmp_path / "uirl_chat.json"
    if isinstance(content, dict):
        chat_config.write(tmp_path, OWN, LAYOUT)
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(ModelError) as caught:
        ChatConfig().completed(tmp_path)
    assert reason in str(caught.value) and str(path) in str(caught.value)
