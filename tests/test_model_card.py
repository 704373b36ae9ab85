"""The card of an export: its metadata, its numbers, and text from a run that tries to be more."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from tests import tiny_config, tiny_model
from tools import export, model_card
from uirl_jax import policy_sync
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig, TaskConfig
from uirl_jax.errors import ConfigError
from uirl_jax.families import loading
from uirl_jax.models import hub, weights
from uirl_jax.models.lora import LoraConfig
from uirl_jax.run import open_run
from uirl_jax.store import open_store

HOSTILE = (
    'x"\n---\nlicense: evil\n---\n# y',
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "| a | b |\n|---|---|\n",
    "``` `` ` [link](http://evil.example) ![p](http://evil.example/p.png) <http://evil.example>",
    "{{ 7 * 7 }} {% x %} $\\frac{1}{2}$ &lt; \\",
    ": - ? & * ! % @ # ' \u0085 \u2028 \u202e \x00 \ud83d\ude00 ü",
)


def config(**changes) -> RunConfig:
    cfg = tiny_config.get_config()
    cfg.model.path = "asset:tiny-ui-base"
    return dataclasses.replace(reading.from_config(RunConfig, cfg), **changes)


def described(workdir: Path, **changes) -> model_card.Export:
    fields = {
        "kind": "adapter",
        "name": "agent",
        "what": "policy version 3",
        "cfg": config(),
        "workdir": workdir,
        "base": model_card.Base("Qwen/Qwen2-VL-2B-Instruct", "", False),
        "action_format": "text",
    }
    return model_card.Export(**(fields | changes))


def card_of(tmp_path, **changes) -> str:
    tmp_path.mkdir(exist_ok=True)
    model_card.write(tmp_path, described(tmp_path, **changes))
    return (tmp_path / "README.md").read_text(encoding="utf-8")


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def body_of(card: str) -> str:
    return card.split("\n---\n", 1)[1]


def evaluated(workdir: Path, stage: str, successes: object, attempts: object, **changes) -> None:
    rate = {"successes": successes, "attempts": attempts, "rate": 0.5, "low": 0.9, "high": 0.9}
    content = rate | {
        "stage": stage,
        "per_task": {"desktop/click_button": rate},
        "env_errors": 0,
        "missing": 0,
        "stop_reasons": {},
        "mean_reward": 0.5,
        "mean_turns": 1.0,
        "finished_unix_s": 1.0,
    }
    file = workdir / "eval" / f"{len(list(workdir.rglob('*.json')))}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | changes))


def test_head_is_what_the_hub_reads(tmp_path):
    card = card_of(tmp_path)
    data = ModelCard(card).data.to_dict()
    assert data == head_of(card)
    assert data["base_model"] == "Qwen/Qwen2-VL-2B-Instruct"
    assert data["base_model_relation"] == "adapter" and data["library_name"] == "peft"
    assert {"uirl_jax", "lora"} <= set(data["tags"])
    merged = head_of(card_of(tmp_path / "merged", kind="merged"))
    assert merged["library_name"] == "transformers" and "lora" not in merged["tags"]
    assert merged["base_model_relation"] == "finetune"


@pytest.mark.parametrize(
    ("base", "kind", "named"),
    [
        (("", "", False), "adapter", False),
        (("Qwen/Qwen2-VL-2B-Instruct", "main", True), "adapter", False),  # its base is another one
        (("Qwen/Qwen2-VL-2B-Instruct", "main", True), "merged", True),
    ],
)
def test_base_that_no_one_can_load_is_not_named_in_the_head(tmp_path, base, kind, named):
    card = card_of(tmp_path, base=model_card.Base(*base), kind=kind)
    assert ("base_model" in head_of(card)) == named
    assert ('from_pretrained("BASE")' in card) == (kind == "adapter")


def test_evaluations_have_wilson_intervals_of_their_counts(tmp_path):
    evaluated(tmp_path, "before", 48, 200)
    evaluated(tmp_path, "after", 199, 200)
    evaluated(tmp_path, "lies", "many", 3)
    evaluated(tmp_path, "more", 4, 3)
    card = card_of(tmp_path)
    # As docs/evaluation.md has them of the same counts; not the 0.9 of the files.
    assert "| `before` | `all` | 24.0% | 18.6% to 30.4% | 48/200 |" in card
    assert "| `after` | `all` | 99.5% | 97.2% to 99.9% | 199/200 |" in card
    assert "`lies`" not in card and "| `more`" not in card
    (tmp_path / "eval" / "x.json").write_text('{"stage": "<b>"}')
    assert "Not readable: " in card_of(tmp_path) and "<b>" not in card_of(tmp_path)


def test_mean_reward_is_shown_where_other_than_successes_were_paid(tmp_path):
    evaluated(tmp_path, "before", 0, 100, mean_reward=0.5344)
    old = {"successes": 1, "attempts": 50, "rate": 0.02, "low": 0.0, "high": 0.1}
    per_task = {"a": old, "b": old | {"mean_reward": 0.25}}  # `old` is of an earlier release
    evaluated(tmp_path, "after", 1, 100, mean_reward=0.6871, per_task=per_task)
    card = card_of(tmp_path)
    assert "| stage | task | success | 95 % interval | episodes | reward |" in card
    assert "| `before` | `all` | 0.0% | 0.0% to 3.7% | 0/100 | 0.534 |" in card
    assert "| `after` | `all` | 1.0% | 0.2% to 5.4% | 1/100 | 0.687 |" in card
    assert "| `after` | `a` | 2.0% | 0.4% to 10.5% | 1/50 | - |" in card
    assert "| `after` | `b` | 2.0% | 0.4% to 10.5% | 1/50 | 0.250 |" in card
    evaluated(tmp_path / "paid", "after", 50, 100, mean_reward=0.5)
    assert "reward |" not in card_of(tmp_path / "paid")


def test_tuning_instances_are_not_called_held_out(tmp_path):
    evaluated(tmp_path, "after", 1, 2)
    assert "Held-out instances of the run's tasks" in card_of(tmp_path)
    evaluation = dataclasses.replace(config().evaluation, seeds="tuning")
    card = card_of(tmp_path, cfg=config(evaluation=evaluation))
    assert "Held-out" not in card and "Instances for choosing settings" in card


def test_suites_have_a_row_for_each_policy(tmp_path):
    for name, content in (
        ("base", {"all": {"success": {"successes": 48, "attempts": 200}}}),
        ("version_120", {"all": {"success": {"successes": 199, "attempts": 200}}}),
        ("odd", {"all": {"success": {"successes": "<b>", "attempts": 200}}}),
        ("other", ["x"]),
    ):
        folder = tmp_path / "eval" / "suites" / "desk|top" / name
        folder.mkdir(parents=True)
        (folder / "scores.json").write_text(json.dumps(content))
    card = card_of(tmp_path)
    assert r"| desk\|top | `version_120` | 99.5% | 97.2% to 99.9% | 199/200 |" in card
    assert r"| desk\|top | `base` | 24.0% | 18.6% to 30.4% | 48/200 |" in card
    assert "<b>" not in card and "`odd`" not in card and "`other`" not in card
    assert "`before`" not in card  # no stage was evaluated


def test_config_shows_what_differs_and_neither_addresses_nor_secrets(tmp_path):
    cfg = config()
    verifier = dataclasses.replace(
        cfg.verifier, urls=("http://user:pw@10.1.2.3/",), token_file="/home/me/token", dialect="g1"
    )
    openai = dataclasses.replace(
        cfg.engine.openai, url="http://gpu-7.corp:8000/v1", adapters_dir="/srv/adapters"
    )
    cfg = dataclasses.replace(
        cfg, verifier=verifier, engine=dataclasses.replace(cfg.engine, openai=openai), seed=7
    )
    card = card_of(tmp_path, cfg=cfg)
    for secret in ("10.1.2.3", "pw", "/home/me", "gpu-7", "/srv/adapters", "asset:"):
        assert secret not in card, secret
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*)` \|$", card, re.MULTILINE))
    assert rows["seed"] == "7" and rows["verifier.dialect"] == "g1"
    assert rows["learner.steps"] == "4" and rows["learner.optimizer.schedule"] == "cosine"
    # Defaults are not shown, and every value that is shown is no default.
    assert "algorithm.epochs" not in rows and "engine.kind" not in rows
    default = RunConfig(cfg.model, cfg.tasks, type(cfg.learner)(steps=1))
    shown = dict(model_card.differing(dataclasses.replace(default, seed=3)))
    assert shown == {"learner.steps": 1, "seed": 3}


@pytest.mark.parametrize(("rank", "asked"), [(1, 1), (3, 8), (16, 16), (100, 128), (512, 512)])
def test_server_is_asked_for_a_rank_that_it_takes(tmp_path, rank, asked):
    """vLLM's --max-lora-rank is one of a few numbers."""
    model = dataclasses.replace(config().model, lora=LoraConfig(rank=rank))
    card = card_of(tmp_path, cfg=config(model=model))
    assert f"--max-lora-rank {asked} " in card and "tower-connector" not in card
    assert "--enable-tower-connector-lora" in card_of(tmp_path, trains_vision=True)
    assert "chat-template" not in card
    (tmp_path / "chat_template.jinja").touch()
    assert "--chat-template agent/chat_template.jinja" in card_of(tmp_path)


def test_data_counts_the_episodes_of_the_run(tmp_path):
    assert "not counted yet, because the run has not ended" in card_of(tmp_path)
    counts = dict.fromkeys(("trained", "stale", "quarantined", "duplicate", "pending"), 0)
    summary = {"episodes": counts | {"published": 32, "trained": 32}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    card = card_of(tmp_path)
    assert "32 published, 32 trained, 0 stale" in card and "bundled server" in card
    summary["episodes"]["trained"] = "<b>"
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "<b>" not in card_of(tmp_path)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append(tag)


def tags_of(card: str) -> list[str]:
    """The elements that a page of the card has."""
    parser = Tags()
    parser.feed(MarkdownIt("commonmark").enable("table").render(body_of(card)))
    return parser.seen


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_nothing_of_the_card(tmp_path, text):
    """Wherever a run can put text: the card has the elements and the head of one with `x y`."""

    def card_with(text: str, folder: str) -> str:
        workdir = tmp_path / folder
        workdir.mkdir()
        encoded = text.encode("utf-8", "replace").decode()  # a file cannot hold a lone surrogate
        evaluated(workdir, encoded, 1, 2, renderers=[encoded])
        cfg = config(tasks=(TaskConfig("desktop/a", variant=text), TaskConfig(text)))
        cfg = dataclasses.replace(
            cfg,
            chat=dataclasses.replace(cfg.chat, system_prompt=text),
            model=dataclasses.replace(
                cfg.model, lora=dataclasses.replace(cfg.model.lora, targets=(text,))
            ),
        )
        (workdir / "chat_template.jinja").touch()
        base = model_card.Base(text, text, False)
        return card_of(workdir, cfg=cfg, name=text, what=text, action_format=text, base=base)

    plain, hostile = card_with("x y", "plain"), card_with(text, "hostile")
    heads = [head_of(card) for card in (plain, hostile)]
    assert isinstance(heads[1].pop("base_model"), str) and heads[0].pop("base_model") == "x y"
    assert heads[0] == heads[1]
    kinds = [[tag for tag in tags_of(card) if tag != "code"] for card in (plain, hostile)]
    assert kinds[0] == kinds[1]
    assert hostile.count("\n") == plain.count("\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x85\u2028\u202e]", hostile)


def test_base_of_a_run_on_the_hub_and_by_a_flag():
    on_hub = dataclasses.replace(config().model, path="hf://Qwen/Qwen2-VL-2B-Instruct@" + "a" * 40)
    found = export.described_base(config(model=on_hub), "")
    assert found == model_card.Base("Qwen/Qwen2-VL-2B-Instruct", "a" * 40, False)
    assert export.described_base(config(), "") == model_card.Base("", "", False)
    assert export.described_base(config(), "me/base").loadable == "me/base"
    cold = dataclasses.replace(config().cold_start, steps=5)
    assert export.described_base(config(model=on_hub, cold_start=cold), "").loadable == ""
    for wrong in ("/a/path", "one", "a/b\n", "../up/x"):
        with pytest.raises(ConfigError, match=r"expected a name on the Hugging Face hub"):
            export.described_base(config(), wrong)
    assert hub.repository_of("asset:tiny-ui-base") is None


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> tuple[Path, Path]:
    """(model directory, a run on it that published version 3)."""
    root = tmp_path_factory.mktemp("run")
    model_dir = tiny_model.write(root / "model")
    cfg = tiny_config.get_config()
    cfg.model.path = str(model_dir)
    run_id = open_run(root / "run", reading.from_config(RunConfig, cfg))
    loaded = loading.load(model_dir, lora=LoraConfig(16, 32.0, ("attention", "mlp")), seed=0)
    trained = jax.tree.map(lambda leaf: leaf + jnp.float32(0.01), loaded.trainable)
    policy_sync.publish(
        open_store(root / "run"),
        version=3,
        step=3,
        arrays=weights.adapters_to_numpy(trained),
        base_hash=loaded.base_hash,
        run_id=run_id,
        extra={},
    )
    return model_dir, root / "run"


@pytest.mark.parametrize("kind", ["adapter", "merged"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_program_of_the_card_loads_the_export(workdir, tmp_path, monkeypatch, kind):
    """With the names of the card, in the folder where both directories lie."""
    pytest.importorskip("peft")
    model_dir, run = workdir
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.v1").mkdir()
    arguments = [kind, f"--workdir={run}", "--out=agent.v1", "--base-model=me/base"]
    assert export.main(arguments) == 0
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "base").symlink_to(model_dir)
    card = (tmp_path / "agent.v1" / "README.md").read_text()
    assert head_of(card)["base_model"] == "me/base" and "policy version 3" in card
    programs = re.findall(r"^```python\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(programs[0], "card", "exec"), names)
    assert names["model"].config.model_type == "qwen2_vl"
    ours = programs[1].partition("vlm.predict_action")[0]
    exec(compile(ours, "card", "exec"), names)
    assert names["vlm"].trainable_parameters()
    if kind == "adapter":
        config = json.loads((tmp_path / "agent.v1" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "me/base"
        assert names["model"].peft_config["default"].r == 16
        assert "--max-lora-rank 16" in card and "--lora-modules agent=agent.v1" in card


def test_wrong_base_model_is_one_line_before_anything_is_read(workdir, tmp_path, capsys):
    arguments = ["adapter", f"--workdir={workdir[1]}", f"--out={tmp_path / 'x'}"]
    assert export.main([*arguments, "--base-model=/a/path"]) == 1
    error = capsys.readouterr().err
    assert "--base-model=/a/path: expected a name" in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()
