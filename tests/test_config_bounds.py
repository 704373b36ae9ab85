"""Every number of a config has a range, and a value outside is refused with it before a start."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import quickstart
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError


def numbers_of(cls: type, path: str = "config") -> Iterator[tuple[str, dataclasses.Field]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        options = [hints[field.name], *typing.get_args(hints[field.name])]
        sections = [o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)]
        for section in sections:
            yield from numbers_of(section, f"{path}.{field.name}")
        if not sections and {int, float} & set(options):
            yield f"{path}.{field.name}", field


NUMBERS = dict(numbers_of(RunConfig))


def set_number(cfg: ConfigDict, path: list[str], value: Any) -> None:
    *sections, name = path
    with cfg.unlocked():
        for part in sections:
            if part not in cfg:
                cfg[part] = ConfigDict()
            cfg = cfg[part]
        cfg[name] = value


def test_delay_is_one_that_the_server_takes():
    cfg = quickstart.get_config()
    set_number(cfg, ["verifier", "action_delay_s"], 11.0)
    with pytest.raises(ConfigError, match="action_delay_s=11: at most 10 on the bundled server"):
        reading.from_config(RunConfig, cfg)
    cfg.verifier.urls = ("http://127.0.0.1:1",)
    assert reading.from_config(RunConfig, cfg).verifier.action_delay_s == 11.0


def test_every_number_of_the_config_has_a_lower_and_an_upper_bound():
    assert len(NUMBERS) > 90
    lacking = [
        path
        for path, field in NUMBERS.items()
        if len({"min", "above"} & field.metadata.keys()) != 1
        or len({"max", "below"} & field.metadata.keys()) != 1
    ]
    assert lacking == []


ELEMENTS = {
    *("config.tasks.max_turns", "config.algorithm.reward.functions.weight"),
    "config.verifier.recorded.rewards",
}


def test_numbers_of_elements_are_refused_as_well():
    assert set(NUMBERS) >= ELEMENTS
    cfg = quickstart.get_config()
    cfg.tasks[0].max_turns = 0
    cfg.algorithm.reward = ConfigDict()
    cfg.algorithm.reward.functions = (ConfigDict({"function": "a:b", "weight": 1e7}),)
    weights = {"type": 1e7, "form": float("nan")}
    cfg.verifier = ConfigDict({"recorded": ConfigDict({"rewards": weights})})
    with pytest.raises(ConfigError) as caught:
        reading.from_config(RunConfig, cfg)
    assert "recorded.rewards.type: got 10000000.0, expected -1000 to 1000" in str(caught.value)
    assert "recorded.rewards.form: got nan, expected a finite number" in str(caught.value)
    assert "config.tasks[0].max_turns: got 0, expected 1 to 10,000" in str(caught.value)
    assert "reward.functions[0].weight: got 10000000.0, expected -1e+06" in str(caught.value)


@pytest.mark.parametrize("path", [path for path in NUMBERS if path not in ELEMENTS])
@pytest.mark.parametrize("side", ["low", "high"])
def test_number_outside_its_range_is_refused_with_the_range(path, side):
    metadata = NUMBERS[path].metadata
    value: Any
    if side == "low":
        value = metadata["min"] - 1 if "min" in metadata else metadata["above"]
    else:
        value = metadata["max"] + 1 if "max" in metadata else metadata["below"]
    cfg = quickstart.get_config()
    is_tuple = "tuple" in str(NUMBERS[path].type)
    set_number(cfg, path.split(".")[1:], (value,) if is_tuple else value)
    with pytest.raises(ConfigError, match=r"got -?[\d.e+]+, expected .*\d"):
        reading.from_config(RunConfig, cfg)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("actor.rollout.episode_timeout_s", 0.0, "expected more than 0 and at most 86400"),
        ("actor.rollout.max_context_tokens", 0, "expected 1 to 10,000,000"),
        ("actor.rollout.temperature", -1.0, "expected 0 to 100"),
        ("actor.rollout.top_p", 0.0, "expected more than 0 and at most 1"),
        ("actor.group_size", 10**12, "expected 1 to 4,096"),
        ("learner.optimizer.lr", -1e-3, "expected 0 to 1"),
        ("learner.optimizer.clip_norm", 0.0, "expected more than 0 and at most 1e"),
        ("algorithm.advantage.turn_discount", 1e300, "expected 0 to 1"),
        ("model.lora.rank", 10**9, "expected 1 to 4,096"),
        ("learner.optimizer.lr", float("nan"), "expected a finite number"),
    ],
)
def test_values_that_once_ran_or_failed_late(key, value, said):
    cfg = quickstart.get_config()
    set_number(cfg, key.split("."), value)
    with pytest.raises(ConfigError) as caught:
        reading.from_config(RunConfig, cfg)
    assert f"config.{key}: got" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"actor.rollout.temperature": 0.0}, "temperature=0: greedy episodes of an instance"),
        ({"actor.rollout.temperature": 1e-4}, "actor.rollout.temperature=0.0001: expected 0 (gre"),
        ({"evaluation.temperature": 1e-9}, "evaluation.temperature=1e-09: expected 0 (greedy) or"),
        ({"actor.rollout.temperature": 0.0, "learner.steps": 0}, ""),
        ({"actor.rollout.temperature": 1e-3, "evaluation.temperature": 1e-3}, ""),
    ],
)
def test_temperatures_that_fail_in_the_first_step_are_refused_in_one_line(values, said):
    cfg = quickstart.get_config()
    for key, value in values.items():
        set_number(cfg, key.split("."), value)
    if not said:
        reading.from_config(RunConfig, cfg)
        return
    with pytest.raises(ConfigError) as caught:
        reading.from_config(RunConfig, cfg)
    assert said in str(caught.value) and "\n" not in str(caught.value)
