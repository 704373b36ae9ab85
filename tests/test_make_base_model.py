"""The tool that makes the shipped base model, cut down; and the model that ships."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tools import make_base_model
from tools.base_models.tiny_architectures import BASES
from uirl_jax import actions
from uirl_jax.errors import ConfigError
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop, drawing

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "uirl_jax" / "assets" / "tiny-ui-base"


def test_stages_learn_at_the_rates_of_the_command():
    steps = {"finding": 1, "telling": 2, "acting": 3}
    recipe = make_base_model.Recipe(
        steps, 4, 0.4, 0, "cosine", 2e-4, "apart", "tools.make_base_model"
    )
    stages = make_base_model.stages(recipe)
    assert [(s.name, s.steps, s.lr, s.quality, s.schedule) for s in stages] == [
        ("finding", 1, 2e-3, 1.0, "constant"),
        ("telling", 2, 2e-3, 1.0, "cosine"),
        ("acting", 3, 2e-4, 0.4, "cosine"),
    ]
    joint = make_base_model.stages(dataclasses.replace(recipe, telling_schedule="joint"))
    assert [(s.name, s.steps, s.lr, s.quality, s.schedule, s.spoilt_from) for s in joint] == [
        ("finding", 1, 2e-3, 1.0, "constant", 0),
        ("telling", 5, 2e-3, 0.4, "cosine", 2),
    ]
    card = make_base_model.model_card(BASES["llava"], recipe, 1, 1.0)
    assert "--telling_schedule=cosine --acting_lr=0.0002 --questions=apart --batch_rows=4" in card


@pytest.fixture
def setting_of(tmp_path):
    def make(family: str) -> make_base_model.Setting:
        base = BASES[family]
        tokenizer = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base), 512)
        base.tokenizer.save(tokenizer, tmp_path)
        chat = Chat(tmp_path, base.chat, base.family.chat)
        inputs = base.family.make_inputs(base.config(tokenizer))
        return make_base_model.Setting(base, chat, inputs)

    return make


def test_a_joint_stage_is_spoilt_from_where_acting_begins(setting_of, monkeypatch):
    setting = setting_of("qwen2_vl")
    qualities = []
    looking_example = make_base_model.looking_example

    def watched(setting, rng, quality, buttons, colors):
        qualities.append(quality)
        return looking_example(setting, rng, quality, buttons, colors)

    monkeypatch.setattr(make_base_model, "looking_example", watched)
    steps = {"finding": 0, "telling": 2, "acting": 3}
    recipe = make_base_model.Recipe(
        steps, 1, 0.4, 0, "joint", 1e-3, "in_turn", "tools.make_base_model"
    )
    _, joint = make_base_model.stages(recipe)
    for step in range(joint.steps):
        make_base_model.draw(setting, joint, recipe, step)
    assert qualities == [1.0, 1.0, 0.4, 0.4, 0.4]


@pytest.mark.parametrize("family", BASES)
def test_make_base_model_of_a_few_steps_writes_a_model_that_loads(family, tmp_path):
    out = tmp_path / "model"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "tools.make_base_model", f"--family={family}"),
            *(f"--out={out}", f"--workdir={tmp_path / 'work'}", "--batch_rows=4"),
            *("--finding_steps=2", "--telling_steps=2", "--acting_steps=2"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    model = loading.load(out, lora=None, seed=0)
    assert 1_000_000 < sum(x.size for x in _leaves(model.trainable)) < 4_100_000
    assert sum(file.stat().st_size for file in out.iterdir()) < 8 * 2**20
    card = (out / "README.md").read_text()
    assert "--finding_steps=2" in card
    assert ("keeps its initial weights" in card) != BASES[family].trains_vision
    assert f"--questions={BASES[family].flags.get('questions', 'in_turn')}" in card
    assert model.family.model_type == family
    processor = json.loads((out / "preprocessor_config.json").read_text())["processor_class"]
    assert processor in dir(importlib.import_module(f"transformers.models.{family}"))
    chat = Chat(out, BASES[family].chat, model.family.chat)
    assert ChatConfig().completed(out).coordinates == BASES[family].coordinates
    assert chat.vocab_size <= model.cfg.vocab_size
    assert chat.image_token_id == model.cfg.image_token_id
    texts = make_base_model.tokenizer_texts(BASES[family])
    _, _, split = make_base_model.new_model(BASES[family], texts, 0, tmp_path / "again")
    begun = nnx.state(nnx.merge(*split), nnx.Param)
    kept = {
        part: all(
            np.array_equal(leaf.astype(jnp.bfloat16), np.asarray(found, jnp.bfloat16))
            for leaf, found in zip(
                _leaves(begun[part]), _leaves(model.trainable[part]), strict=True
            )
        )
        for part in begun
    }
    vision = BASES[family].family.vision_parts
    assert all(kept[part] != BASES[family].trains_vision for part in vision)
    assert not any(kept[part] for part in kept if part not in vision)


def test_shipped_base_model_is_whole():
    model = loading.load(SHIPPED, lora=None, seed=0)
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 8 * 2**20
    assert json.loads((SHIPPED / "config.json").read_text())["model_type"] == "qwen2_vl"
    assert "make_base_model" in (SHIPPED / "README.md").read_text()
    assert all(np.isfinite(leaf).all() for leaf in _leaves(model.trainable))


@pytest.mark.parametrize("family", BASES)
def test_looking_example_answers_hit_what_was_asked_for(family, setting_of):
    setting = setting_of(family)
    base, chat, _ = setting
    asked_for = set()
    for seed in range(20):
        example = make_base_model.looking_example(setting, np.random.default_rng(seed), 1.0, 3, 5)
        task_seed = int(np.random.default_rng(seed).integers(2**30))
        session = desktop.open_session(
            TaskSpec("desktop/click_button", task_seed, "buttons=3,colors=5")
        )
        turns = np.split(example.token_ids_t, np.flatnonzero(np.diff(example.mask_t)) + 1)
        assert len(turns) == 2 * make_base_model.QUESTIONS
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            (color,) = re.findall(r"Click the (\w+) button", chat.decode(question))
            (screen,) = example.screens
            assert_hits(setting, answer, screen, session.targets[color])
            asked_for.add(color)
        assert len(example.token_ids_t) <= make_base_model.row_tokens(base, screen)
    assert asked_for == set(list(drawing.BUTTON_COLORS)[:5])


@pytest.mark.parametrize("family", [name for name in BASES if not BASES[name].family.prefix_lm])
def test_questions_apart_are_whole_and_their_answers_hit(family, setting_of):
    setting = setting_of(family)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        example = make_base_model.questions_example(setting, rng, 1.0, 3, 5)
        task_seed = int(np.random.default_rng(seed).integers(2**30))
        session = desktop.open_session(
            TaskSpec("desktop/click_button", task_seed, "buttons=3,colors=5")
        )
        assert len(example.asked) == 8
        for ids_t, answer in example.asked:
            whole_t = np.concatenate([example.prefix_t, ids_t])
            (color,) = re.findall(r"Click the (\w+) button", setting.chat.decode(whole_t))
            assert_hits(setting, ids_t[-answer:], example.screen, session.targets[color])


def test_checkpoints_of_another_recipe_are_not_gone_on_with(tmp_path):
    path = tmp_path / "work" / "recipe.json"
    make_base_model.check_recipe(path, {"seed": 0, "lr": 1e-3})
    make_base_model.check_recipe(path, {"seed": 0, "lr": 1e-3})
    with pytest.raises(ConfigError, match="another training: seed=1, these are of 0; give another"):
        make_base_model.check_recipe(path, {"seed": 1, "lr": 1e-3})
    for text in ("[]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="give another --workdir"):
            make_base_model.check_recipe(path, {"seed": 0})
    for module, flag in (("make_base_model", "--quality=0.5"), ("make_page_model", "--lr=1")):
        (tmp_path / "recipe.json").write_text('{"quality": 0.1}')
        (tmp_path / "pages.json").write_text('{"lr": 0.1}')
        process = subprocess.run(
            [
                *(sys.executable, "-m", f"tools.{module}", flag),
                *(f"--out={tmp_path / 'out'}", f"--workdir={tmp_path}"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert process.returncode == 2
        assert "--workdir: " in process.stderr and "of another training" in process.stderr


def test_questions_cannot_be_apart_where_the_screen_sees_them(tmp_path):
    command = [sys.executable, "-m", "tools.make_base_model", "--family=paligemma"]
    process = subprocess.run(
        [*command, "--questions=apart", f"--out={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 2
    assert "to paligemma a screen looks different with every question" in process.stderr


def assert_hits(setting, answer_t, screen, target):
    click = actions.parse(
        setting.chat.decode(answer_t),
        (224, 168),
        setting.chat.action_format,
        image_size=screen.seen_px,
        margins=screen.margins,
    )
    x0, y0, x1, y1 = target
    assert x0 <= click.x < x1 and y0 <= click.y < y1


def _leaves(state) -> list:
    import jax

    return jax.tree.leaves(state)
