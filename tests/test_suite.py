"""tasks.json: what is read, and fifty broken ones, each one line that names the place."""

import json

import pytest

from tests.chromium import scripted_tasks
from uirl_jax.config import suites
from uirl_jax.config.suites import read_suite
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation.suite import Suite, SuiteTask, distinct
from uirl_jax.seeds import eval_seed, tune_seed
from uirl_jax.types import TaskSpec

CLICK = {"name": "desktop/click_button", "instances": 2}
GOOD = {"name": "mine", "tasks": [CLICK]}


def write(tmp_path, content: object) -> str:
    path = tmp_path / "tasks.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_instances_are_held_out_and_seeds_are_taken_as_they_are(tmp_path):
    text = {"name": "desktop/enter_text", "variant": "words=2", "max_turns": 6, "seeds": [8, 7]}
    content = {**GOOD, "tasks": [{**CLICK, "first": 5}, text], "attempts": 3, "temperature": 1}
    suite = read_suite(write(tmp_path, content))
    assert (suite.name, suite.attempts, suite.temperature) == ("mine", 3, 1.0)
    assert suite.specs == [
        TaskSpec("desktop/click_button", eval_seed(5)),
        TaskSpec("desktop/click_button", eval_seed(6)),
        TaskSpec("desktop/enter_text", 8, "words=2", 6),
        TaskSpec("desktop/enter_text", 7, "words=2", 6),
    ]


def test_tuning_behind_a_suite_plays_as_many_tuning_instances_under_another_name(tmp_path):
    named = {"name": "desktop/enter_text", "max_turns": 6, "seeds": [8, 7]}
    path = write(tmp_path, {**GOOD, "tasks": [{**CLICK, "first": 5}, named]})
    suite = read_suite(f"{path}:tuning")
    assert suite.name == "mine-tuning"
    assert suite.specs == [
        TaskSpec("desktop/click_button", tune_seed(5)),
        TaskSpec("desktop/click_button", tune_seed(6)),
        TaskSpec("desktop/enter_text", 8, "", 6),
        TaskSpec("desktop/enter_text", 7, "", 6),
    ]
    assert len(read_suite("miniwob16:tuning").specs) == len(read_suite("miniwob16").specs)
    with pytest.raises(ConfigError, match="no such file"):
        read_suite("nowhere:tuning")


def test_suite_of_distinct_instances_keeps_the_first_of_each_kind_that_shows_the_same():
    suite = Suite(
        "s",
        (
            SuiteTask("a", instances=5, first=2),
            SuiteTask("a", "walk=1", instances=2),
            SuiteTask("a", seeds=(eval_seed(0), eval_seed(9))),
            SuiteTask("b", instances=4),
        ),
    )

    def shown_by(spec):  # three rows; what b shows is not known
        return spec.seed % 3 if spec.name == "a" else None

    kept = suite.only(distinct(suite.specs, shown_by))
    assert kept.tasks == (
        SuiteTask("a", seeds=tuple(eval_seed(n) for n in (2, 3, 4))),
        *(suite.tasks[1], suite.tasks[3]),
    )
    assert kept.only(distinct(kept.specs, shown_by)) == kept


def test_suites_that_ship_are_whole_and_named_like_their_files():
    assert suites.shipped()
    for name in suites.shipped():
        assert read_suite(name).name == name


@pytest.mark.browser  # the pages come with the browser's packages
def test_suite_of_unseen_tasks_has_ten_on_which_no_shipped_model_was_trained():
    unseen = {task.name for task in read_suite("miniwob-unseen").tasks}
    assert len(unseen) == 10 and unseen <= set(scripted_tasks())
    for name in ("pix2act", "miniwob16"):
        assert not unseen & {task.name for task in read_suite(name).tasks}


BROKEN = [
    (b"", "is not JSON"),
    (b"[]", "expected an object"),
    (b"{", "is not JSON"),
    (b"\xff\xfe", "is not UTF-8"),
    (b'{"name": "a", "name": "b"}', "name"),
    (b'{"name": "a", "tasks": NaN}', "NaN"),
    (b'{"name": "a", "tasks": 1e999}', "1e999"),
    (b'{"a": ' + b"[" * 4000 + b"]" * 4000 + b"}", "nested"),
    (b'{"name": "' + b"x" * (8 * 2**20) + b'"}', "bytes, expected at most"),
    ({}, "tasks.json.name: missing"),
    ({}, "tasks.json.tasks: missing"),
    ({**GOOD, "name": ""}, "name=''"),
    ({**GOOD, "name": "../up"}, "name='../up'"),
    ({**GOOD, "name": "a/b"}, "name='a/b'"),
    ({**GOOD, "name": ".hidden"}, "name='.hidden'"),
    ({**GOOD, "name": "a b"}, "name='a b'"),
    ({**GOOD, "name": "x" * 65}, "expected 1 to 64"),
    ({**GOOD, "name": "a\nb"}, "name='a\\nb'"),
    ({**GOOD, "name": 7}, "tasks.json.name: got int 7"),
    ({**GOOD, "name": None}, "tasks.json.name"),
    ({**GOOD, "tasks": []}, "tasks is empty"),
    ({**GOOD, "tasks": {}}, "tasks.json.tasks"),
    ({**GOOD, "tasks": "desktop/click_button"}, "tasks.json.tasks"),
    ({**GOOD, "tasks": [None]}, "tasks.json.tasks[0]"),
    ({**GOOD, "tasks": ["desktop/click_button"]}, "tasks.json.tasks[0]"),
    ({**GOOD, "tasks": [CLICK, {}]}, "tasks.json.tasks[1].name: missing"),
    ({**GOOD, "tasks": [{**CLICK, "name": ""}]}, "tasks.json.tasks[0]: name is empty"),
    ({**GOOD, "tasks": [{**CLICK, "name": 3}]}, "tasks.json.tasks[0].name"),
    ({**GOOD, "tasks": [{"name": "a"}]}, "tasks.json.tasks[0]: expected either instances"),
    ({**GOOD, "tasks": [{**CLICK, "seeds": [1]}]}, "got both"),
    ({**GOOD, "tasks": [{**CLICK, "instances": -1}]}, "tasks.json.tasks[0].instances: got -1"),
    ({**GOOD, "tasks": [{**CLICK, "instances": 10**6}]}, "tasks.json.tasks[0].instances"),
    ({**GOOD, "tasks": [{**CLICK, "instances": 1.5}]}, "tasks.json.tasks[0].instances"),
    ({**GOOD, "tasks": [{**CLICK, "instances": "2"}]}, "tasks.json.tasks[0].instances"),
    ({**GOOD, "tasks": [{**CLICK, "instances": True}]}, "tasks.json.tasks[0].instances"),
    ({**GOOD, "tasks": [{**CLICK, "first": -1}]}, "tasks.json.tasks[0].first"),
    ({**GOOD, "tasks": [{**CLICK, "first": 2**29 - 1}]}, "first + instances: at most"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": [1], "first": 2}]}, "first goes with instances"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": [1, 1]}]}, "seeds: 1 is there more than once"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": [-1]}]}, "tasks.json.tasks[0].seeds: got -1"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": [2**31]}]}, "tasks.json.tasks[0].seeds"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": 5}]}, "tasks.json.tasks[0].seeds"),
    ({**GOOD, "tasks": [{"name": "a", "seeds": ["5"]}]}, "tasks.json.tasks[0].seeds[0]"),
    ({**GOOD, "tasks": [{**CLICK, "max_turns": 0}]}, "tasks.json.tasks[0].max_turns: got 0"),
    ({**GOOD, "tasks": [{**CLICK, "max_turn": 2}]}, "unknown key; did you mean"),
    ({**GOOD, "tasks": [{**CLICK, "variant": 2}]}, "tasks.json.tasks[0].variant"),
    ({**GOOD, "tasks": [CLICK, CLICK]}, "is there more than once; use attempts"),
    ({**GOOD, "tasks": [{**CLICK, "instances": 10**5}], "attempts": 2, "temperature": 1.0}, "2000"),
    ({**GOOD, "attempts": 0}, "tasks.json.attempts: got 0"),
    ({**GOOD, "attempts": 4}, "would play the same episode again"),
    ({**GOOD, "temperature": -1}, "tasks.json.temperature: got -1"),
    ({**GOOD, "temperature": 1e-5}, "temperature=1e-05, expected 0 (greedy) or at least 0.001"),
    ({**GOOD, "temperature": "hot"}, "tasks.json.temperature"),
    ({**GOOD, "a\nb\u202e": 1}, "unknown key"),
]


@pytest.mark.parametrize(("content", "said"), BROKEN, ids=range(len(BROKEN)))
def test_broken_file_is_one_line_that_names_the_place(tmp_path, content, said):
    with pytest.raises(ConfigError) as caught:
        read_suite(write(tmp_path, content))
    message = str(caught.value)
    assert said in message and "tasks.json" in message
    assert message.isprintable() and len(message) < 2500


def test_name_of_no_suite_lists_those_that_ship(tmp_path):
    with pytest.raises(ConfigError, match=r"--tasks=nowhere: no such file, nor .*: desktop"):
        read_suite("nowhere")
