"""The run's page: complete, honest about what is missing, safe with hostile text, fit to look at.

Runs are made with the project's own writers over the real desktop;
`PYTHONPATH=. python tests/test_report.py DIR` makes one to look at.
"""

import asyncio
import dataclasses
import functools
import hashlib
import html
import html.parser
import http.server
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import uirl_jax
from uirl_jax import actions, evaluation, watch
from uirl_jax.errors import UirlError
from uirl_jax.metrics import COLD_START_DIR, MetricsWriter
from uirl_jax.shards.record import TokenLayout
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers.tasks import desktop
from uirl_jax.watch import charts, frames, gather

LAYOUT = TokenLayout(vocab_size=100, image_token_id=7)
KINDS = (
    TaskSpec("desktop/click_button", 0, "buttons=4,by=color", max_turns=2),
    TaskSpec("desktop/enter_text", 0, max_turns=5),
    TaskSpec("desktop/data_entry", 0, "rows=2", max_turns=20),
)


def play(task: TaskSpec, quality: float, version: int, text: str | None = None) -> Trajectory:
    """The scripted demonstrator's episode on the real desktop; `text` replaces its last words."""
    session = desktop.open_session(task)
    rng = np.random.default_rng([task.seed, version])
    images, image_tokens, turns, keys = {}, {}, [], []
    while len(turns) < task.max_turns and not session.progress()["done"]:
        encoded = io.BytesIO()
        session.screenshot().save(encoded, "PNG")
        key = hashlib.sha256(encoded.getvalue()).hexdigest()
        images[key] = encoded.getvalue()
        image_tokens[key] = (session.height_px // 28) * (session.width_px // 28)
        keys.append(key)
        action = desktop.scripted_action(session, rng, quality)
        session.act(action)
        placeholders = [7] * image_tokens[key]
        earlier = turns[-1] if turns else None
        context = [*(np.concatenate([earlier.context_ids, earlier.token_ids]) if earlier else [])]
        turns.append(
            Turn(
                context_ids=np.array([*context, 1, *placeholders, 2], np.int32),
                token_ids=np.array([3, 4, 5], np.int32),
                logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
                full_logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
                policy_versions=np.full(3, version, np.int32),
                image_keys=tuple(keys),
                text=actions.format_action(action, (session.width_px, session.height_px)),
                action=action,
                progress=session.progress(),
            )
        )
    if text is not None:
        turns[-1] = dataclasses.replace(turns[-1], text=text, action=None, error="no such action")
    reward = float(session.progress()["reward"] or 0.0)
    done = bool(session.progress()["done"])
    reason = StopReason.COMPLETED if reward == 1.0 else StopReason.FAILED
    return Trajectory(
        episode_id=f"{task.name}-{task.seed}-{version}",
        group_id=f"{task.name}-{task.seed}",
        task=task,
        instruction=session.instruction,
        turns=tuple(turns),
        images=images,
        image_tokens=image_tokens,
        stop_reason=StopReason.FORMAT_ERROR if text else reason if done else StopReason.MAX_TURNS,
        reward=0.0 if text else reward,
        success=reward == 1.0 and not text,
        run_id="test-run",
        actor_id="eval",
    )


def evaluate_stage(workdir: Path, stage: str, quality: float, n: int = 6, **hostile: str) -> None:
    tasks = evaluation.eval_tasks(KINDS, n)
    version = int(quality * 100)
    played = [
        play(task, quality, version, hostile.get("text") if k == 0 else None)
        for k, task in enumerate(tasks)
    ]
    asyncio.run(
        evaluation.evaluate(
            lambda _: played, tasks, stage, workdir, base_hash="f" * 64, layout=LAYOUT
        )
    )


def write_metrics(workdir: Path, steps: int) -> None:
    """Curves as a run of the quickstart leaves them."""
    rng = np.random.default_rng(0)
    with MetricsWriter(workdir / COLD_START_DIR, trackers=()) as writer:
        for step in range(10, 10 * steps, 10):
            writer.write(step, {"sft/loss": 4.0 * np.exp(-step / 200) + 0.3 + rng.normal(0, 0.03)})
    with MetricsWriter(workdir, trackers=()) as writer:
        for step in range(1, steps + 1):
            share = 1 / (1 + np.exp(-(step - steps / 2.5) / (steps / 9)))
            success = float(np.clip(0.4 + 0.56 * share + rng.normal(0, 0.04), 0, 1))
            counts = {"published": 16 * step + 8, "trained": 16 * step, "stale": 0, "pending": 8}
            writer.write(
                step,
                {
                    "reward/mean": success,
                    "success/mean": success,
                    "actor/kl_loss": 0.08 * share + abs(rng.normal(0, 0.004)),
                    "actor/entropy": 1.2 - 0.8 * share + rng.normal(0, 0.03),
                    "actor/clip_fraction": abs(rng.normal(0.03, 0.02)),
                    "actor/policy_loss": rng.normal(-0.01, 0.02),
                    "learner/grad_norm": abs(rng.normal(0.8, 0.3)),
                    "learner/tokens_per_s": 5200 + rng.normal(0, 220),
                    "time/learn_s": 1.4 + rng.normal(0, 0.06),
                    "time/wait_for_records_s": abs(rng.normal(2.1, 0.3)),
                    "time/save_and_publish_s": 0.3,
                    "stop_reason/completed": success,
                    "stop_reason/failed": (1 - success) * 0.8,
                    "stop_reason/format_error": (1 - success) * 0.2,
                    "groups/with_signal": 0.9 - 0.6 * share,
                    **{f"task/{kind.name}/success": success for kind in KINDS},
                    **{f"task/{kind.name}/signal": 0.9 - 0.6 * share for kind in KINDS},
                    "offpolicy/staleness": float(rng.integers(0, 2)),
                    "offpolicy/drift": 1e-4 + abs(rng.normal(0, 2e-5)),
                    "agent_loop/tool_calls/mean": 2.0 + rng.normal(0, 0.1),
                    "engine/batch_fill": 0.8,
                    "compile/count": 4.0,
                    **{f"records/{name}": counts.get(name, 0) for name in (
                        "published", *evaluation.FATES
                    )},
                },
            )  # fmt: skip


def write_run(workdir: Path, steps: int = 60) -> Path:
    """A finished run, hostile text and all."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_metrics(workdir, steps)
    evaluate_stage(workdir, "before", 0.35, text="<script>alert(1)</script>\u202egnp.exe")
    evaluate_stage(workdir, "cold_start", 0.6)
    evaluate_stage(workdir, "after", 1.0)
    (workdir / "config.json").write_text(
        json.dumps({"learner": {"steps": steps}, "verifier": {"token": "hunter2-secret"}})
    )
    evaluation.write_summary(
        workdir,
        evaluation.summary(
            evaluation.read_results(workdir),
            seed=3,
            train_seconds=412.5,
            peak_rss_gib=3.21,
            accounting={"published": 100, "trained": 90, "stale": 4, "quarantined": 1,
                        "duplicate": 2, "pending": 3},
            lost=5,
            env_error=6,
            report=workdir / watch.REPORT_FILE,
            facts=watch.machine_facts() | {"devices": "1 cpu"},
        ),
    )  # fmt: skip
    return watch.write_report(workdir)


class Page(html.parser.HTMLParser):
    """What a test asks of a page: its text by element, and every attribute value."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of_class(self, tag: str, name: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and name in (a.get("class") or "").split()]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report") / "a run & more"
    write_run(directory, steps=30)
    return directory


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page((run_dir / watch.REPORT_FILE).read_text(encoding="utf-8"))


def words(text: str) -> str:
    return " ".join(text.split())


def test_report_finished_run_shows_result_and_curves(run_dir: Path, page: Page) -> None:
    text = words(page.text)
    results = evaluation.read_results(run_dir)
    assert list(results) == ["before", "cold_start", "after"]
    for result in results.values():
        assert f"{result.successes} of {result.attempts}" in text
        assert charts.format_value(result.low, "%").replace("\xa0", " ") in text
    assert "finished" in text and "a run & more" in text
    labels = [attrs.get("aria-label") or "" for tag, attrs in page.tags if tag == "svg"]
    for title in ("Reward", "Success in training", "KL to the base model", "Entropy", "Speed",
                  "Clipped tokens", "Seconds per step", "Loss on demonstrations"):  # fmt: skip
        assert any(label.startswith(f"{title}. ") for label in labels), title
    assert sum(label.startswith("agent_loop/tool_calls/mean. ") for label in labels) == 1
    assert not any(label.startswith("task/") for label in labels), "drawn by task, not one by one"
    of_tasks = text.partition("Tasks in training")[2].partition("Cold start")[0]
    for kind in KINDS:
        assert sum(label.startswith(f"{kind.name}. ") for label in labels) == 1, kind.name
        assert kind.name in of_tasks
    assert "groups with a signal" in of_tasks and "Tasks in training" in text
    assert "100 published = 90 trained + 4 stale + 1 quarantined + 2 duplicate + 3 pending" in text
    assert "5 lost" in text and "6 broken by the environment" in text
    assert "6m52s" in text and "3.21 GiB" in text and "1 cpu" in text


def test_report_curve_path_ends_at_last_value() -> None:
    series = charts.Series("share", ((1.0, 0.0), (5.0, 0.5), (9.0, 1.0)))
    (line,) = charts.line_chart("x", [series], full_share=True).lines
    numbers = [float(n) for n in re.findall(r"[\d.]+", line.path)]
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    top, bottom = charts.TOP, charts.HEIGHT - charts.BOTTOM
    # By hand: the first step at the left, the last at the right, 0 at the bottom and 1 at the top.
    assert numbers == [left, bottom, (left + right) / 2, (top + bottom) / 2, right, top]


def test_report_draws_rewards_that_are_no_successes_in_a_chart_of_their_own(
    tmp_path: Path,
) -> None:
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(0, {"task/click/success": 0.4})  # as earlier releases began it
        for step in (1, 2, 3):
            of_click = {"task/click/success": 0.5, "task/click/reward": 0.5}
            of_angle = {"task/angle/success": 0.0, "task/angle/reward": -40.0 * step}
            writer.write(step, {**of_click, **of_angle})
    page = Page(watch.write_report(tmp_path).read_text(encoding="utf-8"))
    labels = [attrs.get("aria-label") or "" for tag, attrs in page.tags if tag == "svg"]
    (shown,) = [label for label in labels if label.startswith("angle, reward. ")]
    assert "\N{MINUS SIGN}120 at step 3" in shown and "%" not in shown
    assert not [label for label in labels if label.startswith("click, reward")]
    assert not [label for label in labels if label.startswith("task/")]


def test_report_shows_the_reward_of_tasks_that_are_paid_otherwise_than_by_success(
    tmp_path: Path,
) -> None:
    tasks = [TaskSpec(f"own/{name}", 1) for name in ("angle", "click")]
    one = dataclasses.replace(play(KINDS[0], 1.0, 0), success=True, reward=1.0)
    angle, click = (dataclasses.replace(one, task=task) for task in tasks)
    played = [dataclasses.replace(angle, success=False, reward=0.75), click]
    result = evaluation.count("before", tasks, played)
    (tmp_path / "eval").mkdir()
    evaluation.write_json(tmp_path / "eval" / "before.json", dataclasses.asdict(result))
    watch.write_report(tmp_path)
    text = words(Page((tmp_path / watch.REPORT_FILE).read_text(encoding="utf-8")).text)
    assert "own/angle0 % of 1, reward 0.750 own/click100 % of 1 " in text
    assert text.count(", reward") == 1


def test_report_curve_that_is_smoothed_says_where_it_ends_not_its_last_step() -> None:
    series = charts.Series("share", tuple((float(k), float(k % 3 == 0)) for k in range(40)))
    chart = charts.line_chart("x", [series], unit="%", full_share=True)
    assert chart.smoothed_over == 3 and chart.lines[0].last == "33.3\xa0%"


def test_report_stacked_areas_lie_on_each_other() -> None:
    steps = (0.0, 10.0)
    one = charts.Series("one", tuple((at, 1.0) for at in steps))
    two = charts.Series("two", tuple((at, 3.0) for at in steps))
    low, high = charts.line_chart("x", [one, two], stacked=True).lines
    bottom, height = charts.HEIGHT - charts.BOTTOM, charts.HEIGHT - charts.TOP - charts.BOTTOM
    y_of = {value: f"{bottom - value / 4 * height:.1f}" for value in (0, 1, 4)}
    assert [p.split()[1] for p in low.path[1:-1].split("L")] == [y_of[1]] * 2 + [y_of[0]] * 2
    assert [p.split()[1] for p in high.path[1:-1].split("L")] == [y_of[4]] * 2 + [y_of[1]] * 2


def test_report_chart_any_values_stay_inside_axes() -> None:
    for values in ([0.0], [5.0] * 4, [-1e-9, 1e-9], [1e12, 2e12], [-3.0, -3.0], [1e-300, 0.0]):
        series = charts.Series("v", tuple((float(k), v) for k, v in enumerate(values)))
        for from_zero in (False, True):
            chart = charts.line_chart("x", [series], from_zero=from_zero)
            ys = [float(part.split()[1]) for part in chart.lines[0].path[1:].split("L")]
            assert all(charts.TOP - 0.1 <= y <= charts.HEIGHT - charts.BOTTOM + 0.1 for y in ys)
            assert 2 <= len(chart.y_ticks) <= 7
            assert len({tick.text for tick in chart.y_ticks}) == len(chart.y_ticks), values


def test_report_long_run_is_binned_not_cut() -> None:
    series = charts.Series("v", tuple((float(k), float(k)) for k in range(10_000)))
    chart = charts.line_chart("x", [series])
    assert chart.lines[0].path.count("L") == charts.MAX_POINTS - 1
    assert [tick.text for tick in chart.x_ticks] == ["2500", "5000", "7500"]
    assert "step 9999" in chart.description


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4125, "%", "41.2\xa0%"), (1.0, "%", "100\xa0%"), (1520.4, "", "1,520"), (0.0, "", "0"),
        (-0.00312, "", "\N{MINUS SIGN}0.00312"), (2.5, "s", "2.50\xa0s"),
        (1e-9, "", "1.0e\N{MINUS SIGN}09"),
    ],
)  # fmt: skip
def test_report_number_reads_well(value: float, unit: str, text: str) -> None:
    assert charts.format_value(value, unit) == text


def test_report_hostile_text_is_shown_not_run(run_dir: Path, page: Page) -> None:
    source = (run_dir / watch.REPORT_FILE).read_text(encoding="utf-8")
    assert "<script>alert(1)</script>\\u202egnp.exe" in page.text
    assert "\u202e" not in source
    assert not [
        tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "base", "form")
    ]
    for _, attrs in page.tags:
        assert "style" not in attrs and not [name for name in attrs if name.startswith("on")]


def test_report_requests_nothing(page: Page) -> None:
    urls = [
        value or ""
        for _, attrs in page.tags
        for name, value in attrs.items()
        if name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data")
    ]
    assert urls and all(url.startswith("data:") for url in urls)
    (style,) = re.findall(r"<style>(.*?)</style>", Path(uirl_jax.__file__).with_name("templates")
                          .joinpath("report.html.j2").read_text())  # fmt: skip
    css = Path(uirl_jax.__file__).with_name("templates").joinpath("report.css").read_text()
    assert style == "{{ css }}" and "url(" not in css and "@import" not in css


def test_report_secret_in_config_is_hidden(run_dir: Path, page: Page) -> None:
    assert "hunter2" not in (run_dir / watch.REPORT_FILE).read_text() and "(hidden)" in page.text
    assert gather.without_secrets({"max_new_tokens": 5, "token": ""}) == {
        "max_new_tokens": 5,
        "token": "",
    }


def test_report_episodes_before_and_after_are_the_same_instance(page: Page) -> None:
    assert len(page.of_class("article", "pair")) == 6
    assert len(page.of_class("div", "side")) == 12
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert all(attrs["alt"] for attrs in pictures)
    # 224x168 screens are doubled, pixel by pixel; 448x336 ones are shown as they are.
    assert {(a["width"], a["height"], a.get("class")) for a in pictures} == {
        ("448", "336", "crisp"),
        ("448", "336", None),
    }


def test_report_mark_is_where_the_action_was() -> None:
    mark = frames.mark(Action("click", x=30, y=40), 224, 168)
    assert mark == frames.Mark(30.5, 40.5, None, None, off_screen=False)
    drag = frames.mark(Action("drag", x=1, y=2, x2=300, y2=4), 224, 168)
    assert drag == frames.Mark(1.5, 2.5, 223.5, 4.5, off_screen=True)
    assert frames.mark(Action("type", text="x"), 224, 168) is None


@pytest.mark.parametrize("data", [b"", b"<svg onload=alert(1)>", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_report_bytes_that_are_no_screenshot_leave_a_blank(data: bytes) -> None:
    trajectory = play(TaskSpec("desktop/click_button", 1), 1.0, 0)
    key = trajectory.turns[0].image_keys[-1]
    broken = dataclasses.replace(trajectory, images={key: data})
    frame = frames.frame(1, broken.turns[0], broken)
    assert frame.source == "" and frame.mark is None and "no screenshot" in frame.alt


def test_report_empty_workdir_says_what_is_missing(tmp_path: Path) -> None:
    text = words(Page(watch.write_report(tmp_path).read_text()).text)
    assert "no step taken yet" in text and "No stage has been evaluated yet." in text
    assert "Episodes" not in text


def test_report_running_run_shows_what_there_is(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    evaluate_stage(tmp_path, "before", 0.5)
    page = Page(watch.write_report(tmp_path).read_text())
    text = words(page.text)
    assert "in progress, 3 steps done" in text
    assert "56 published = 48 trained" in text  # from the last line of metrics.jsonl
    assert len(page.of_class("div", "side")) == 6  # one stage: nothing beside it


def test_report_chance_is_in_the_table_and_no_policy_to_begin_from(tmp_path: Path) -> None:
    for stage, quality in ((evaluation.CHANCE, 0.0), ("before", 0.5), ("after", 1.0)):
        evaluate_stage(tmp_path, stage, quality, n=2)
    text = words(Page(watch.write_report(tmp_path).read_text()).text)
    assert "Success on held-out tasks, before and after" in text
    table, _, episodes = text.partition("not selected by outcome")
    assert "random" in table and "random" not in episodes and "before" in episodes


def test_report_broken_files_are_named_on_the_page(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    evaluate_stage(tmp_path, "before", 0.5)
    evaluate_stage(tmp_path, "after", 0.5)
    shard = tmp_path / "eval" / "after" / evaluation.EPISODES_FILE
    shard.write_bytes(shard.read_bytes()[:-40])
    (tmp_path / "summary.json").write_text('{"seed": 3, "epi')
    (tmp_path / "config.json").write_text("[]")
    text = words(Page(watch.write_report(tmp_path).read_text()).text)
    assert "episodes of stage after are left out" in text
    assert "summary.json is not JSON" in text and "config.json is not a JSON object" in text


def test_report_no_workdir_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UirlError, match="no such directory"):
        watch.write_report(tmp_path / "nowhere")


# ---------------------------------------------------------------- in a browser

PROBE = """<!doctype html><body><iframe src="report.html" width="{width}" height="900"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const boxes = [...page.querySelectorAll("body *")].filter(
    e => !e.closest(".strip, .scroll, pre"));  // these may scroll by themselves
  const wide = boxes.filter(e => e.getBoundingClientRect().right > root.clientWidth + 1);
  const out = {{
    overflow: root.scrollWidth - root.clientWidth,
    wide: wide.map(e => e.tagName + "." + e.getAttribute("class")).slice(0, 5),
    font: getComputedStyle(page.querySelector("h1")).fontSize,
    charts: [...page.querySelectorAll(".chart .line, .chart .area")].filter(
      e => e.getBoundingClientRect().width > 100 && e.getBoundingClientRect().height >= 0).length,
    shots: [...page.querySelectorAll("img")].filter(e => e.naturalWidth > 0).length,
    images: page.querySelectorAll("img").length,
    marks: [...page.querySelectorAll(".screen")].map(e => {{
      const ring = e.querySelector("circle.mark");
      if (!ring) return null;
      const at = ring.getBoundingClientRect(), image = e.querySelector("img");
      const to = image.getBoundingClientRect(), scale = to.width / image.naturalWidth;
      return [((at.left + at.right) / 2 - to.left) / scale - ring.cx.baseVal.value,
              ((at.top + at.bottom) / 2 - to.top) / scale - ring.cy.baseVal.value];
    }}).filter(Boolean),
  }};
  const pre = document.createElement("pre");
  pre.id = "probe"; pre.textContent = JSON.stringify(out); document.body.append(pre);
}};
</script>"""


class Recorder(http.server.SimpleHTTPRequestHandler):
    requests: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:
        self.requests.append(self.path)


@pytest.fixture
def server(run_dir: Path) -> Iterator[str]:
    handler = functools.partial(Recorder, directory=str(run_dir))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def dump_dom(url: str, profile: Path) -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(names)})")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
        "--virtual-time-budget=10000 --window-size=1400,1000"
    )
    command = [browser, *flags.split(), f"--user-data-dir={profile}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_report_in_browser_is_drawn_and_fits(
    run_dir: Path, server: str, tmp_path: Path, width: int
) -> None:
    (run_dir / "probe.html").write_text(PROBE.format(width=width))
    Recorder.requests.clear()
    dom = dump_dom(f"{server}/probe.html", tmp_path)
    (probe,) = re.findall(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    out = json.loads(html.unescape(probe))
    assert out["overflow"] <= 0 and out["wide"] == [], out
    assert out["font"] == "28px"  # the style sheet passed the page's own policy
    assert out["charts"] >= 15
    assert out["shots"] == out["images"] >= 12
    # The ring's middle, measured on the page, is the pixel that was clicked.
    assert len(out["marks"]) >= 12
    assert all(abs(off) < 0.6 for mark in out["marks"] for off in mark), out["marks"]
    assert set(Recorder.requests) <= {"/probe.html", "/report.html", "/favicon.ico"}


if __name__ == "__main__":
    print(write_run(Path(sys.argv[1])))
