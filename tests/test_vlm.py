"""The facade against transformers, on the model that ships: logits, losses, files, an action."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import uirl_jax
from uirl_jax.errors import ConfigError, ImageError, ModelError
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.models.lora import LoraConfig
from uirl_jax.players import BackgroundLoop
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop

MODEL = Path(uirl_jax.__file__).parent / "assets" / "tiny-ui-base"
PLAIN = ChatConfig(system_prompt="", prompt_template="{instruction}")  # as it was taught


@pytest.fixture(scope="module")
def vlm():
    return uirl_jax.VLM.from_pretrained(MODEL, chat=PLAIN)


@pytest.fixture(scope="module")
def reference():
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    return model.eval(), Processor()


@pytest.fixture(scope="module")
def sessions():
    return [desktop.Session(TaskSpec("desktop/click_button", seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def screens(sessions):
    first, second, third = (session.screenshot() for session in sessions)
    return [first, second.resize((168, 112)), third]


class Processor:
    """transformers' own, put together here: the ready one wants torchvision, for videos."""

    def __init__(self):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        self._images = Qwen2VLImageProcessorPil.from_pretrained(MODEL)

    def __call__(self, texts, images):
        inputs = self._images(images, return_tensors="pt")
        counts = iter((inputs["image_grid_thw"].prod(1) // 4).tolist())
        pieces = [text.split("<image>") for text in texts]
        filled = [
            first + "".join(f"{self._image(next(counts))}{piece}" for piece in others)
            for first, *others in pieces
        ]
        inputs |= self.tokenizer(filled, padding=True, return_tensors="pt")
        return inputs

    @staticmethod
    def _image(count):
        return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"


def run_reference(model, inputs, **more):
    is_image_bt = inputs["input_ids"] == model.config.image_token_id
    with torch.no_grad():
        return model(**inputs, mm_token_type_ids=is_image_bt.int(), **more)


def numpy_of(inputs):
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
    return {name: inputs[name].numpy() for name in names}


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_equal_those_of_transformers(vlm, reference, screens, side):
    model, processor = reference
    processor.tokenizer.padding_side = side
    inputs = processor(["<image>Click OK.", "user <image> then <image> now"], screens)
    expected_btv = run_reference(model, inputs).logits.numpy()
    got_btv = vlm.logits(**numpy_of(inputs))
    real_bt = inputs["attention_mask"].numpy() > 0
    assert not real_bt.all() and got_btv.dtype == np.float32
    np.testing.assert_allclose(got_btv[real_bt], expected_btv[real_bt], atol=1e-4)


def test_logits_without_images_equal_those_of_transformers(vlm, reference):
    model, _ = reference
    ids_bt = np.array([[5, 9, 20, 33, 7]])
    with torch.no_grad():
        expected_btv = model(input_ids=torch.tensor(ids_bt)).logits.numpy()
    got_btv = vlm.logits(ids_bt, np.ones_like(ids_bt))
    np.testing.assert_allclose(got_btv, expected_btv, atol=1e-4)
    # The processor of a text alone returns these, too.
    kinds_bt = np.zeros_like(ids_bt)
    same_btv = vlm.logits(ids_bt, np.ones_like(ids_bt), mm_token_type_ids=kinds_bt)
    np.testing.assert_array_equal(same_btv, got_btv)


def test_loss_is_that_of_transformers_over_the_answers_alone(vlm, reference, screens):
    model, processor = reference
    prompts = ["Click the red button.", "Click OK."]
    labels = ["click(120, 80)", "click(7, 9)"]
    losses, tokens = [], []
    for screen, prompt, label in zip(screens, prompts, labels, strict=False):
        head = f"<|im_start|>user\n<image>{prompt}<|im_end|>\n<|im_start|>assistant\n"
        inputs = processor([f"{head}{label}<|im_end|>"], [screen])
        asked = processor([head], [screen])["input_ids"].shape[1]
        wanted = inputs["input_ids"].clone()
        wanted[:, :asked] = -100
        losses.append(float(run_reference(model, inputs, labels=wanted).loss))
        tokens.append(wanted.shape[1] - asked)
    got = vlm.forward(screens[:2], prompts, labels)
    assert float(got["loss"]) == pytest.approx(np.average(losses, weights=tokens), abs=1e-5)


def test_gradients_of_the_parameters_lead_downhill(screens):
    vlm = uirl_jax.VLM.from_pretrained(MODEL, chat=PLAIN)
    example = (screens[:1], ["Click the red button."], ["click(120, 80)"])

    def loss(parameters):
        return vlm.forward(*example, parameters)["loss"]

    before = float(vlm.forward(*example)["loss"])
    parameters = vlm.trainable_parameters()
    gradients = jax.grad(loss)(parameters)
    assert gradients.keys() == parameters.keys()
    squares = sum(float((g**2).sum()) for g in gradients.values())
    rate = 1e-3 / squares  # so small that the loss falls by as much as the gradient says
    vlm.set_parameters({name: parameters[name] - rate * gradients[name] for name in parameters})
    assert float(vlm.forward(*example)["loss"]) == pytest.approx(before - 1e-3, abs=2e-4)


def test_action_is_what_the_text_says_on_the_images_own_pixels(vlm, sessions, screens):
    said = vlm.predict_action(screens[0], sessions[0].instruction)
    assert said.action is not None and said.action.kind == "click" and said.reason == ""
    assert said.text.startswith(f"click({said.action.x}, {said.action.y}")
    again = vlm.predict_action(screens[0], sessions[0].instruction, "text")
    assert again == said
    refused = vlm.predict_action(screens[0], sessions[0].instruction, "json")
    assert refused.action is None and refused.reason


def test_action_in_the_models_pixels_comes_out_in_those_of_the_image(sessions, screens):
    chat = ChatConfig(coordinates="image", system_prompt="", prompt_template="{instruction}")
    vlm = uirl_jax.VLM.from_pretrained(MODEL, chat=chat)
    large = screens[0].resize((230, 174))  # the model sees 224x168 of it
    said = vlm.predict_action(large, sessions[0].instruction)
    x, y = (int(number) for number in said.text[len("click(") :].rstrip(")").split(",")[:2])
    assert (said.action.x, said.action.y) == (round(x * 230 / 224), round(y * 174 / 168))
    assert (said.action.x, said.action.y) != (x, y)


def test_new_parameters_change_what_it_says(screens):
    vlm = uirl_jax.VLM.from_pretrained(MODEL, chat=PLAIN)
    before = vlm.predict_action(screens[0], "Click OK.", max_new_tokens=16)
    rng = np.random.default_rng(0)
    parameters = vlm.trainable_parameters()
    vlm.set_parameters(
        {name: rng.normal(0, 0.5, array.shape).astype("f4") for name, array in parameters.items()}
    )
    assert vlm.predict_action(screens[0], "Click OK.", max_new_tokens=16) != before


def test_files_are_read_again_here_and_by_transformers(tmp_path, reference, screens):
    _, processor = reference
    lora = LoraConfig(rank=4, alpha=8.0, targets=("all",))
    vlm = uirl_jax.VLM.from_pretrained(MODEL, lora=lora, chat=PLAIN)
    rng = np.random.default_rng(0)
    vlm.set_parameters(
        {
            name: array + rng.normal(0, 0.1, array.shape).astype("f4")
            for name, array in vlm.trainable_parameters().items()
        }
    )
    example = (screens[:1], ["Click OK."], ["click(3, 4)"])
    loss = float(vlm.forward(*example)["loss"])
    vlm.save_adapter(tmp_path / "adapter")
    vlm.save_pretrained(tmp_path / "model")
    adapted = uirl_jax.VLM.from_pretrained(
        MODEL, lora=lora, adapter=tmp_path / "adapter", chat=PLAIN
    )
    merged = uirl_jax.VLM.from_pretrained(tmp_path / "model", chat=PLAIN)
    assert float(adapted.forward(*example)["loss"]) == loss
    # The files' dtype is bfloat16: the sum is rounded to 8 bits.
    assert float(merged.forward(*example)["loss"]) == pytest.approx(loss, rel=2e-3)
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    inputs = processor(["<image>Click OK."], screens[:1])
    expected_btv = run_reference(model.eval(), inputs).logits.numpy()
    np.testing.assert_allclose(merged.logits(**numpy_of(inputs)), expected_btv, atol=1e-4)


def test_adapter_brings_its_rank_targets_and_prompts(tmp_path, screens):
    lora = uirl_jax.LoraConfig(rank=3, alpha=5.0, targets=("mlp",))
    chat = ChatConfig(action_format="json", system_prompt="", prompt_template="{instruction}")
    vlm = uirl_jax.VLM.from_pretrained(MODEL, lora=lora, chat=chat)
    rng = np.random.default_rng(0)
    parameters = {
        name: rng.normal(0, 0.1, array.shape).astype("f4")
        for name, array in vlm.trainable_parameters().items()
    }
    vlm.set_parameters(parameters)
    vlm.save_adapter(tmp_path)
    again = uirl_jax.VLM.from_pretrained(MODEL, adapter=tmp_path)
    assert again.trainable_parameters().keys() == parameters.keys()
    for name, array in again.trainable_parameters().items():
        np.testing.assert_array_equal(array, parameters[name])
    assert again.predict_action(screens[0], "Click OK.", max_new_tokens=8) == vlm.predict_action(
        screens[0], "Click OK.", max_new_tokens=8
    )


def test_float16_is_held_as_bfloat16_and_said(screens):
    with pytest.warns(UserWarning, match="float16: bfloat16 is used"):
        vlm = uirl_jax.VLM.from_pretrained(MODEL, dtype="float16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(vlm.model.frozen)} == {"bfloat16"}


def test_every_image_is_looked_at(sessions):
    """One facade, several images of one size: each answer is that of a facade of its own."""
    several = uirl_jax.VLM.from_pretrained(MODEL)
    answers = [several.predict_action(s.screenshot(), "Click the red button.") for s in sessions]
    for session, answer in zip(sessions, answers, strict=True):
        alone = uirl_jax.VLM.from_pretrained(MODEL)
        assert alone.predict_action(session.screenshot(), "Click the red button.") == answer
    assert len({answer.text for answer in answers}) > 1


def test_arrays_and_images_give_the_same_answer(vlm, sessions, screens):
    instruction = sessions[0].instruction
    expected = vlm.predict_action(screens[0], instruction)
    rgb = np.asarray(screens[0])
    assert rgb.shape[2] == 3
    assert vlm.predict_action(rgb, instruction) == expected
    rgba = np.concatenate([rgb, np.full_like(rgb[..., :1], 255)], axis=2)
    assert vlm.predict_action(rgba, instruction) == expected
    grey = vlm.predict_action(rgb[..., 0], instruction)
    assert grey == vlm.predict_action(screens[0].getchannel(0), instruction)
    for wrong in (rgb / 255, rgb[None], rgb[..., :2], rgb.astype(np.int32)):
        with pytest.raises(ImageError, match=r"expected uint8\[H,W\]"):
            vlm.predict_action(wrong, instruction)


def test_interrupted_call_ends_its_engine_and_the_next_one_answers(
    vlm, sessions, screens, monkeypatch
):
    def engine_threads():
        names = ("engine", "pixels", "actor")
        return [t.name for t in threading.enumerate() if t.name.startswith(names)]

    def interrupted(loop, coroutine):
        loop.start(coroutine)
        while not any(name.startswith("engine") for name in engine_threads()):
            time.sleep(0.001)
        raise KeyboardInterrupt  # as from a notebook, in the middle of the first round

    asked = (screens[0], sessions[0].instruction)
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundLoop, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vlm.predict_action(*asked, max_new_tokens=24)
    assert engine_threads() == []
    assert vlm.predict_action(*asked, max_new_tokens=24) == vlm.predict_action(*asked)


def test_top_k_and_top_p_cut_what_is_sampled(vlm, sessions, screens):
    instruction = sessions[0].instruction
    greedy = vlm.predict_action(screens[0], instruction)

    def sampled(**options):
        return {
            vlm.predict_action(screens[0], instruction, temperature=3.0, seed=seed, **options).text
            for seed in range(3)
        }

    assert sampled(top_k=1) == sampled(top_p=1e-6) == {greedy.text}
    assert len(sampled()) > 1
    for options in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="temperature="):
            vlm.predict_action(screens[0], instruction, **options)


def test_frozen_vision_tower_has_no_trainable_parameters():
    vlm = uirl_jax.VLM.from_pretrained(MODEL, lora=LoraConfig(rank=2, targets=("all", "vision")))
    towers = {name.split("/")[0] for name in vlm.trainable_parameters()}
    vlm.freeze_vision_encoder()
    assert towers == {"visual", "text"}
    assert {name.split("/")[0] for name in vlm.trainable_parameters()} == {"text"}


def test_what_does_not_fit_is_an_error_that_says_so(vlm, reference, screens):
    _, processor = reference
    inputs = processor(["<image>Click OK."], screens[:1])
    ids_bt, mask_bt, pixels_pf, grids_n3 = numpy_of(inputs).values()
    with pytest.raises(ImageError, match="image_grid_thw says 192"):
        vlm.logits(ids_bt, mask_bt, pixels_pf[:-1], grids_n3)
    with pytest.raises(ImageError, match=r"runs of image tokens of lengths .48.,"):
        vlm.logits(ids_bt, mask_bt)
    with pytest.raises(ImageError, match="placeholders of 1 images, expected those of 2"):
        vlm.logits(ids_bt, mask_bt, np.tile(pixels_pf, (2, 1)), np.tile(grids_n3, (2, 1)))
    with pytest.raises(ValueError, match=r"expected .B,T. both"):
        vlm.logits(ids_bt, mask_bt[:, 1:])
    with pytest.raises(ValueError, match="0 images, 1 prompts"):
        vlm.forward([], ["Click OK."], ["click(1, 2)"])
    with pytest.raises(ImageError, match=r"nowhere\.png"):
        vlm.predict_action("nowhere.png", "Click OK.")
    with pytest.raises(ConfigError, match="xml"):
        vlm.predict_action(screens[0], "Click OK.", "xml")
    with pytest.raises(ModelError, match="unexpected text/nothing"):
        vlm.set_parameters({"text/nothing": np.zeros(1)})
    with pytest.raises(AttributeError, match="no attribute 'VML'"):
        uirl_jax.VML  # noqa: B018


def test_import_of_the_package_brings_no_jax():
    program = "import sys, uirl_jax; assert not {'jax', 'flax'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
