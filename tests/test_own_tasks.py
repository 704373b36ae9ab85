"""Tasks that people write themselves: the examples played over HTTP, and what is refused."""

import asyncio
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.actor_world import chat, inputs
from tests.chromium import needs_chromium
from tests.served import ask, create, served
from uirl_jax import evaluation
from uirl_jax.config import schema
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.errors import ConfigError, UirlError, UserCodeError, VerifierError
from uirl_jax.learner.cold_start import ColdStartConfig, check_sources
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.server import server, supervisor
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.session_types import OwnDrawing, SessionTypes

EXAMPLES = Path(__file__).parents[1] / "examples" / "own_tasks"
THERMOSTAT, GROCERIES = EXAMPLES / "thermostat", EXAMPLES / "groceries"
DRAWN = """
    from PIL import Image
    from uirl_jax.verifiers import own_tasks

    class Task(own_tasks.DrawnTask):
        def __init__(self, rng, options):
            self.instruction, self.width_px, self.height_px = "Wait.", 20, 10
        def draw(self):
            return Image.new("RGB", (20, 10))
        def act(self, action):
            pass
        def progress(self):
            return {"done": False, "reward": None}
"""

# A drawn task of which one method raises, once a test has named it in `broken`.
BREAKING = """
    from PIL import Image
    from uirl_jax.verifiers import own_tasks

    class Task(own_tasks.DrawnTask):
        broken = ""
        def __init__(self, rng, options):
            self.check("__init__")
            self.instruction, self.width_px, self.height_px = "Wait.", 20, 10
        def draw(self):
            self.check("draw")
            return Image.new("RGB", (20, 10))
        def act(self, action):
            self.check("act")
        def progress(self):
            self.check("progress")
            return {"done": False, "reward": None}
        def check(self, method):
            if self.broken == method:
                raise ValueError("broken here")
"""


def write_task(folder, source=DRAWN, **files):
    folder.mkdir()
    (folder / "task.py").write_text(textwrap.dedent(source))
    for name, text in files.items():
        (folder / name.replace("_html", ".html")).write_text(text)
    return folder


@pytest.mark.parametrize("quality", [1.0, 0.0])
def test_drawn_example_is_played_over_http(quality):
    task = TaskSpec("own/thermostat", 7, "most=6")

    async def run():
        own = own_tasks.load([THERMOSTAT])["own/thermostat"]
        local = OwnDrawing(own, own.make(task))
        rng = np.random.default_rng(0)
        async with (
            serve(task_dirs=[THERMOSTAT]) as port,
            VerifierClient(f"http://127.0.0.1:{port}") as client,
        ):
            session = await client.create(task)
            assert session.instruction == local.instruction
            turns = 0
            while not (progress := await client.progress(session.id))["done"]:
                action = await local.scripted_action(rng, quality)
                await local.act(action)
                shown = await client.act(session.id, action, f"r{turns}")
                assert shown == await local.screenshot("png")
                turns += 1
            after = await client.act(session.id, Action("click", x=100, y=100), "after")
            assert after == shown  # nothing changes after the end
            assert progress == await local.progress()
            return turns, progress

    turns, progress = asyncio.run(run())
    assert progress["reward"] == quality and progress["presses"] == turns
    assert turns > 1 if quality else turns == 1


def test_instances_follow_from_seed_and_variant():
    own = own_tasks.load([THERMOSTAT])["own/thermostat"]
    wanted = [own.make(TaskSpec(own.name, seed)).wanted for seed in range(20)]
    assert wanted == [own.make(TaskSpec(own.name, seed)).wanted for seed in range(20)]
    assert set(wanted) == {21, 22, 23}
    assert {own.make(TaskSpec(own.name, s, "most=1")).wanted for s in range(5)} == {21}
    with pytest.raises(VerifierError, match=r"most is '2', not one of 1, 3, 6"):
        own.make(TaskSpec(own.name, 0, "most=2"))


def test_drawn_example_demonstrates_itself():
    with Demonstrator([str(THERMOSTAT)]) as demonstrator:
        task = TaskSpec("own/thermostat", 7, "most=6", max_turns=8)
        played = demonstrator.demonstrate(task, chat(), inputs(), np.random.default_rng(0))
    assert played.stop_reason is StopReason.COMPLETED and played.success
    assert [turn.action.kind for turn in played.turns] == ["click"] * len(played.turns)


@pytest.mark.parametrize(
    "name", ["own/thermostat", "own/../thermostat", f"own/{THERMOSTAT}", "own/", "own/task.py"]
)
def test_request_never_loads_a_folder(name):
    async def run():
        types = SessionTypes(warm_browsers=0, max_browsers=1)
        with pytest.raises(VerifierError, match=r"unknown task .*--task-dir names"):
            await types.open(TaskSpec(name, 0))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("class Task(", "class Other("), "no class Task"),
        (("def act(", "def acts("), "class Task has no act of its own"),
        (("def draw(", "def drawn("), "class Task has no draw of its own"),
        (("def __init__(", "def begin("), "class Task has no __init__ of its own"),
        (("import Image", "import Picture"), r"task\.py, line 2: ImportError"),
        (('"Wait."', '""'), "instruction is ''"),
        (("20, 10\n", "20, 0\n"), r"width_px, height_px are \(20, 0\)"),
        (('("RGB", (20, 10))', '("RGB", (20, 11))'), r"draw\(\) returned \(20, 11\)"),
        (('("RGB", (20, 10))', '("RGB", 1 / 0)'), r"task\.py, line 9: ZeroDivisionError"),
        (('"Wait."', "1 / 0"), r"task\.py, line 7: ZeroDivisionError"),
        (('"done"', '1 / 0: 0, "done"'), r"task\.py, line 13: ZeroDivisionError"),
        (('"done": False', '"done": 0'), "done=0"),
        (('"done": False', '"done": True'), "reward=None and done=True"),
        (('"reward": None', '"reward": float("nan")'), "reward=nan"),
        (('"reward": None', '"reward": True'), "reward=True"),
        (('"reward": None', '"reward": None, "seen": {1}'), "is not JSON"),
        (("own_tasks.DrawnTask", "own_tasks.PageTask"), r"has a page\.html beside"),
    ],
)
def test_task_that_is_none_is_refused_at_the_start(tmp_path, change, word):
    assert change[0] in textwrap.dedent(DRAWN)
    folder = write_task(tmp_path / "mine", textwrap.dedent(DRAWN).replace(*change))
    with pytest.raises(ConfigError, match=word):
        own_tasks.load([folder])


def test_instance_of_a_page_whose_data_are_not_json_is_the_fault_of_its_task(tmp_path):
    source = """
        from uirl_jax.verifiers import own_tasks

        class Task(own_tasks.PageTask):
            def __init__(self, rng, options):
                self.instruction, self.width_px, self.height_px = "Wait.", 20, 10
                self.data = {1, 2} if options.get("set") else [1, 2]
            variants = {"set": ("1",)}
            def progress(self, state):
                return {"done": False, "reward": None}
    """
    folder = write_task(tmp_path / "mine", source, page_html='<script>var t = "TASK"</script>')
    own = own_tasks.load([folder])["own/mine"]
    own.make(TaskSpec("own/mine", 1))
    with pytest.raises(UserCodeError, match=r"own/mine: .*\{1, 2\} is not JSON"):
        own.make(TaskSpec("own/mine", 1, "set=1"))


def test_all_faults_are_told_at_once(tmp_path):
    good = write_task(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    folders = [good, tmp_path / "empty", tmp_path / "Bad Name", write_task(other / "good")]
    with pytest.raises(ConfigError, match=r"empty: there is no task\.py.*'Bad Name'.*own/good"):
        own_tasks.load(folders)


def test_server_that_is_given_no_task_says_so_in_one_line_and_exits_1(tmp_path, capsys):
    assert server.main(["--task-dir", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: own task ") and errors.count("\n") == 1


def test_page_files_are_those_of_the_folder_and_no_programs(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    source = DRAWN.replace("DrawnTask", "PageTask").replace(
        "def draw", "data = '</script>'\n        def draw"
    )
    folder = write_task(tmp_path / "mine", source, page_html='<script>let t = "TASK";</script>')
    (folder / ".hidden").write_text("x")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.svg").write_text("<svg/>")
    own = own_tasks.load([folder])["own/mine"]
    task = own.make(TaskSpec("own/mine", 0))
    assert own.page_file("", task)[0] == b'<script>let t = "\\u003c/script>";</script>'
    assert own.page_file("pictures/a.svg", task) == (b"<svg/>", "image/svg+xml")
    for path in ("task.py", ".hidden", "../secret.txt", "pictures", "/etc/passwd"):
        assert own.page_file(path, task) is None
    (folder / "link.txt").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"link\.txt is a link out of the folder"):
        own_tasks.load([folder])


@pytest.mark.parametrize("method", ["__init__", "draw", "act", "progress"])
def test_task_that_breaks_is_a_500_with_its_traceback_or_a_422(tmp_path, caplog, method):
    """What cannot be made never can be, and an act may have acted: a 500 would be sent again."""
    own = own_tasks.load([write_task(tmp_path / "mine", BREAKING)])

    async def run():
        types = SessionTypes(warm_browsers=0, max_browsers=1, own=own)
        async with served(types=types) as http:
            path = f"/session/{(await create(http, 'own/mine'))['id']}"
            async with http.ws_connect("/ws") as socket:
                if method == "act":
                    await socket.send_json({"type": "reset", "data": {"task": "own/mine"}})
                    assert (await socket.receive_json())["type"] == "observation"
                own["own/mine"].kind.broken = method
                click = {"action_type": "left_click", "x": 1, "y": 1}
                calls = {
                    "__init__": ("POST", "/session?type=own/mine", {}),
                    "draw": ("GET", f"{path}/screenshot", {}),
                    "act": ("POST", f"{path}/act", {"json": click}),
                    "progress": ("GET", f"{path}/progress", {}),
                }
                verb, url, options = calls[method]
                status, body, _ = await ask(http, verb, url, **options)
                if method in ("__init__", "act"):
                    assert status == 422
                    place = r"own/mine: .*task\.py, line \d+: ValueError: broken here"
                    assert re.fullmatch(place, body["detail"])
                else:
                    assert (status, body) == (500, {"detail": "Internal Server Error"})
                told = {"type": "reset", "data": {"task": "own/mine"}}
                if method == "act":
                    told = {"type": "step", "data": click}
                await socket.send_json(told)
                answer = await socket.receive_json()
                assert answer["data"]["code"] == "EXECUTION_ERROR", answer
            own["own/mine"].kind.broken = ""
            _, shown, _ = await ask(http, "GET", f"{path}/screenshot")  # the session goes on
            assert Image.open(io.BytesIO(shown)).size == (20, 10)

    asyncio.run(run())
    assert len(re.findall(rf'task\.py", line \d+, in {method}\n', caplog.text)) == 2
    assert re.search(r"UserCodeError: own/mine: .*task\.py, line \d+: ValueError: br", caplog.text)


def clicked(folder, source: str, times: int) -> tuple[list, int, int]:
    """Answers to the same click so many times, the acts of a task that counts them, and its
    session's count of actions."""
    counts = textwrap.dedent(source).replace(
        '{"done"', '{"acts": vars(self).get("acts", 0), "done"'
    )
    write_task(folder, counts)

    async def run():
        async with served(task_dirs=[folder]) as http:
            session = await create(http, "own/mine")
            path = f"/session/{session['id']}"
            click = {"action_type": "left_click", "x": 1, "y": 1, "request_id": "a"}
            answers = [await ask(http, "POST", f"{path}/act", json=click) for _ in range(times)]
            acts = (await ask(http, "GET", f"{path}/progress"))[1]["acts"]
            return answers, acts, (await ask(http, "GET", path))[1]["action_count"]

    return asyncio.run(run())


def test_repeated_act_whose_screen_could_not_be_drawn_is_not_applied_again(tmp_path):
    source = textwrap.dedent(DRAWN).replace(
        "        pass", "        self.acts, self.fails = getattr(self, 'acts', 0) + 1, True"
    )
    source = source.replace(
        "        return Image",
        "        if vars(self).pop('fails', False):\n"
        "            raise OSError('no font')\n"
        "        return Image",
    )
    answers, acts, count = clicked(tmp_path / "mine", source, 3)
    assert [status for status, _, _ in answers] == [500, 200, 200]
    assert answers[1] == answers[2] and (acts, count) == (1, 1)


def test_act_whose_task_raises_after_its_effect_is_not_asked_for_again(tmp_path):
    source = textwrap.dedent(DRAWN).replace(
        "        pass",
        "        self.acts = getattr(self, 'acts', 0) + 1\n        raise KeyError('no such field')",
    )
    (answer,), acts, _ = clicked(tmp_path / "mine", source, 1)
    status, said, _ = answer
    assert status == 422 and "no such field" in said["detail"]  # a 500 would be sent again
    assert acts == 1


def test_server_that_a_run_starts_has_the_tasks_of_its_config(tmp_path):
    """A process of its own, as `main` starts it."""
    port_file = tmp_path / "port"

    async def run():
        async with VerifierClient(supervisor.read_urls(port_file)[0]) as client:
            session = await client.create(TaskSpec("own/thermostat", 7))
            assert session.instruction.startswith("Set the thermostat")

    with supervisor.bundled_server(port_file, tmp_path / "log", task_dirs=[str(THERMOSTAT)]):
        asyncio.run(run())


def test_task_is_called_as_its_folder_however_that_is_named(tmp_path, monkeypatch):
    folder = write_task(tmp_path / "waiting")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for name in (".", "../waiting/", "../link"):
        schema.RunConfig(
            model=schema.ModelConfig(path="m"),
            tasks=(schema.TaskConfig("own/waiting"),),
            learner=schema.LearnerConfig(steps=3),
            verifier=schema.VerifierConfig(task_dirs=(name,)),
        )
        assert list(own_tasks.load([name])) == ["own/waiting"]


def test_config_with_a_task_in_no_folder_is_refused():
    def cfg(name, **verifier):
        return schema.RunConfig(
            model=schema.ModelConfig(path="m"),
            tasks=(schema.TaskConfig(name),),
            learner=schema.LearnerConfig(steps=3),
            verifier=schema.VerifierConfig(**verifier),
        )

    cfg("own/thermostat", task_dirs=("examples/own_tasks/thermostat/",))
    cfg("own/thermostat", urls=("http://127.0.0.1:1",))  # that server's business
    for name in ("own/thermostat", "own/groceries"):
        with pytest.raises(ConfigError, match=rf"'{name}' is not in verifier\.task_dirs"):
            cfg(name, task_dirs=("examples/own_tasks/other",))


def test_cold_start_of_no_steps_says_that_demonstrations_are_unused(capsys):
    check_sources(ColdStartConfig(), (), ())
    assert capsys.readouterr().out == ""
    check_sources(ColdStartConfig(demonstrations=("/nowhere",)), (), ())
    assert capsys.readouterr().out == "event=cold_start steps=0 demonstrations=unused\n"


def test_cold_start_of_a_task_without_a_script_is_refused(tmp_path):
    folder = write_task(tmp_path / "mine", DRAWN)
    names, cfg = ("own/mine", "own/thermostat", "desktop/click_button"), ColdStartConfig(steps=1)
    with pytest.raises(ConfigError, match="own/mine: class Task has no script of its own"):
        check_sources(cfg, names, [folder, THERMOSTAT])
    check_sources(cfg, names[1:], [folder, THERMOSTAT])
    check_sources(ColdStartConfig(), names, [folder])  # no cold start


class TestPage:
    """The example that is a page."""

    pytestmark = needs_chromium

    @pytest.mark.parametrize("quality", [1.0, 0.0])
    def test_page_example_is_played_over_http(self, quality):
        task = TaskSpec("own/groceries", 3, "items=3")

        async def run():
            types = SessionTypes(warm_browsers=0, max_browsers=1, own=own_tasks.load([GROCERIES]))
            rng = np.random.default_rng(0)
            async with (
                serve(task_dirs=[GROCERIES]) as port,
                VerifierClient(f"http://127.0.0.1:{port}") as client,
            ):
                session = await client.create(task)
                # The demonstrator looks into a page of its own, which the same actions change.
                local = await types.open(task)
                try:
                    assert session.instruction == local.instruction
                    while not (progress := await client.progress(session.id))["done"]:
                        action = await local.scripted_action(rng, quality)
                        await local.act(action)
                        shown = await client.act(session.id, action, f"r{rng.integers(10**9)}")
                        assert shown == await local.screenshot("png")
                    assert progress == await local.progress()
                    return progress
                finally:
                    await local.close()
                    await types.close()

        progress = asyncio.run(run())
        assert progress["reward"] == quality and progress["done"]
        assert progress["right"] == (3 if quality else 0) and progress["wrong"] == 0

    def test_page_may_go_to_another_document(self, tmp_path):
        source = DRAWN.replace("DrawnTask", "PageTask").replace(
            "def draw", "data = 1\n        def draw"
        )
        source = source.replace("progress(self)", "progress(self, state)")
        source = source.replace('{"done"', '{"at": state, "done"').replace("20, 10", "100, 80")
        style = "form, body { margin: 0 } button { display: block; width: 80px; height: 40px }"
        page = f"""<!DOCTYPE html><style>{style}</style>
            <form action="second.html"><button>go</button></form>
            <button onclick="location.reload()">again</button>
            <script>"TASK"; const state = () => "first";</script>"""
        folder = write_task(tmp_path / "mine", source, page_html=page)
        blue = "<body style='background: #00f'>"
        (folder / "second.html").write_text(f"{blue}<script>const state = () => 'second';</script>")

        async def run():
            async with served(task_dirs=[folder]) as http:
                session = await create(http, "own/mine")
                path = f"/session/{session['id']}"

                async def act(**fields):
                    status, shown, _ = await ask(http, "POST", f"{path}/act", json=fields)
                    assert status == 200, shown
                    progress = (await ask(http, "GET", f"{path}/progress"))[1]
                    image = Image.open(io.BytesIO(shown)).convert("RGB")
                    return progress["at"], image.getpixel((90, 40)) == (0, 0, 255)

                for _ in range(8):  # one in four is over before anybody looks
                    assert await act(action_type="left_click", x=40, y=60) == ("first", False)
                    assert await act(action_type="left_click", x=40, y=20) == ("second", True)
                    assert await act(action_type="navigate_back") == ("first", False)

        asyncio.run(run())

    def test_page_takes_no_action_after_the_end_though_nobody_has_asked(self, tmp_path):
        source = DRAWN.replace("DrawnTask", "PageTask").replace(
            "def draw", "data = 1\n        def draw"
        )
        source = source.replace("progress(self)", "progress(self, state)")
        source = source.replace(
            '{"done": False, "reward": None}', '{"clicks": state, "done": state > 1, "reward": 0}'
        )
        page = """<script>let clicks = "TASK" - 1; const state = () => clicks;
            addEventListener("mousedown", () => { clicks += 1; });</script>"""
        folder = write_task(tmp_path / "mine", source, page_html=page)

        async def run():
            async with served(task_dirs=[folder]) as http:
                session = await create(http, "own/mine")
                path = f"/session/{session['id']}"
                click = {"action_type": "left_click", "x": 1, "y": 1}
                for _ in range(4):
                    assert (await ask(http, "POST", f"{path}/act", json=click))[0] == 200
                _, progress, _ = await ask(http, "GET", f"{path}/progress")
                assert progress == {"clicks": 2, "done": True, "reward": 0}

        asyncio.run(run())

    def test_page_whose_judge_breaks_is_a_500(self, tmp_path, caplog):
        source = DRAWN.replace("DrawnTask", "PageTask").replace(
            "def draw", "data = 1\n        def draw"
        )
        source = source.replace("progress(self)", "progress(self, state)")
        source = source.replace("return {", "int(state)\n            return {")
        page = '<script>"TASK"; let seen = 0; const state = () => seen++ ? "none" : "1";</script>'
        folder = write_task(tmp_path / "mine", source, page_html=page)

        async def run():
            async with served(task_dirs=[folder]) as http:
                session = await create(http, "own/mine")
                path = f"/session/{session['id']}"
                assert (await ask(http, "GET", f"{path}/progress"))[0] == 500

        asyncio.run(run())
        assert "ValueError: invalid literal for int()" in caplog.text

    def test_page_without_a_state_is_refused_with_the_reason(self, tmp_path):
        source = DRAWN.replace("DrawnTask", "PageTask").replace(
            "def draw", "data = 1\n        def draw"
        )
        folder = write_task(tmp_path / "mine", source, page_html='<script>"TASK"</script>')

        async def run():
            async with (
                serve(task_dirs=[folder]) as port,
                VerifierClient(f"http://127.0.0.1:{port}") as client,
            ):
                with pytest.raises(UirlError, match=r"422.*state is not defined"):
                    await client.create(TaskSpec("own/mine", 0))

        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["thermostat", pytest.param("groceries", marks=needs_chromium)])
def test_page_of_own_tasks_is_walked_to_a_trained_agent(tmp_path, task):
    """The command of docs/own_task.md; minutes for the thermostat, an hour for groceries."""
    command = [sys.executable, "-m", "uirl_jax.main", f"--workdir={tmp_path}"]
    config = f"--config=configs/own_task.py:{task}"
    root = Path(__file__).parents[1]
    process = subprocess.run([*command, config], cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = evaluation.read_results(tmp_path)
    assert results["before"].rate <= 0.1 and results["after"].rate >= 0.9
    assert "event=derived key=engine.context_lengths" in process.stdout
