"""The work that `tools.bench` times beside transformers and peft is the same, in every family."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import models, peers, sample, train, work

SIZE = work.Size(group=4, image_tokens=(6, 5), prompt_tokens=10, sampled_tokens=6)


def shallow(family: str) -> Any:
    """The model with three text blocks and four vision blocks, all kinds among them."""
    cfg = models.CONFIGS[family]
    kinds = {
        "qwen2_5_vl": {"fullatt_block_indexes": (2,)},
        "qwen3_vl": {"deepstack_visual_indexes": (1, 3)},
    }
    vision = dataclasses.replace(cfg.vision, depth=4, **kinds.get(family, {}))
    return dataclasses.replace(cfg, num_hidden_layers=3, vision=vision)


@pytest.fixture(scope="module", params=models.CONFIGS)
def directory(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    work.write_work(directory, request.param, shallow(request.param), SIZE)
    return directory


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21.2
def test_steps_of_ours_and_of_the_peers_compute_the_same(directory):
    steps = {
        "ours": train.jax_step(directory, share_prompts=True),
        "torch_peft": peers.torch_step(directory, encode_once=False),
        "torch_peft_encoded_once": peers.torch_step(directory, encode_once=True),
    }
    taken = {name: [step() for _ in range(2)] for name, step in steps.items()}
    assert train.differences(taken) == []
    assert all(step["kl"] > 1e-4 and step["grad_norm"] > 0.1 for step in taken["ours"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_steps_in_bfloat16_compute_the_same_up_to_rounding(tmp_path):
    size = dataclasses.replace(SIZE, dtype="bfloat16")
    work.write_work(tmp_path, "qwen2_vl", shallow("qwen2_vl"), size)
    steps = {
        "ours": train.jax_step(tmp_path, share_prompts=True),
        "torch_peft": peers.torch_step(tmp_path, encode_once=False),
        "torch_peft_encoded_once": peers.torch_step(tmp_path, encode_once=True),
    }
    taken = {name: [step() for _ in range(2)] for name, step in steps.items()}
    assert train.differences(taken, "bfloat16") == []
    assert train.differences(taken)  # they were computed in bfloat16
    assert all(step["kl"] > 1e-3 for step in taken["ours"])


def test_a_published_model_is_chosen_with_a_whole_screen_in_bfloat16():
    parser = argparse.ArgumentParser()
    models.add_flags(parser)
    family, cfg, size = models.chosen(parser.parse_args(["--model=Qwen3-VL-2B-Instruct"]))
    assert (family, cfg.num_hidden_layers, size.dtype) == ("qwen3_vl", 28, "bfloat16")
    family, cfg, size = models.chosen(parser.parse_args(["--family=qwen3_vl"]))
    assert (family, cfg, size) == ("qwen3_vl", models.CONFIGS["qwen3_vl"], work.SMALL)


def test_the_share_of_equal_tokens_ends_where_answers_part():
    assert sample.equal_share([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75
    assert sample.equal_share([[1, 2]]) == 1.0


def test_differences_names_step_contender_and_value():
    step = {"loss": 0.1, "nll": 9.0, "kl": 0.01, "grad_norm": 1.0}
    other = step | {"kl": 0.011}
    found = train.differences({"ours": [step, step], "torch_peft": [step, other]})
    assert found == ["step 1: kl=0.01100000 of torch_peft, 0.01000000 of ours"]
    broken = step | {"nll": float("nan")}
    assert train.differences({"ours": [step], "torch_peft": [broken]})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_greedy_tokens_of_engine_and_generate_are_the_same(directory):
    ours = sample.our_work(directory)("different", 1, greedy=True)["token_ids"]
    theirs = peers.torch_generate(directory)("different", 1, greedy=True)["token_ids"]
    sample.check_tokens({"ours": ours, "transformers": theirs})
    assert len({tuple(row) for row in ours}) > 8  # not one answer for every prompt


def test_other_tokens_end_the_measurement():
    with pytest.raises(SystemExit, match=r"greedy tokens differ: prompt 1: .*\[5, 6\]"):
        sample.check_tokens({"ours": [[1, 2], [3, 4]], "transformers": [[1, 2], [5, 6]]})
