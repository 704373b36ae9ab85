"""Every action format: texts as models write them, round trips, junk, and coordinate spaces."""

import json
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.any_action import any_action
from uirl_jax import actions
from uirl_jax.actions.coordinates import BINS, convert
from uirl_jax.errors import ActionError, ConfigError
from uirl_jax.types import Action

SCREEN = (1280, 800)
IMAGE = (1288, 812)  # what Qwen2-VL's resizing makes of it
QUICK = hypothesis.settings(deadline=None, max_examples=60)


def tool_call(tool: str, arguments: str, before: str = "") -> str:
    return f'{before}<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def box(x: int, y: int) -> str:
    return f"<|box_start|>({x},{y})<|box_end|>"


# format, text, action on SCREEN; by hand: 500/999 of 1280 is 640.6, 644 of 1288 is the middle
READ = [
    ("json", '{"type": "click", "x": 100, "y": 200}', Action("click", x=100, y=200)),
    ("json", '{"action": "click", "x": 100.0, "y": 200}', Action("click", x=100, y=200)),
    ("json", '{"action_type": "wait", "seconds": 2}', Action("wait", seconds=2.0)),
    ("json", 'I wait: {"type": "wait", "seconds": 2}', Action("wait", seconds=2.0)),
    (
        "json",
        'I wait:\n\n```json\n{"type": "wait", "seconds": 2}\n```',
        Action("wait", seconds=2.0),
    ),
    ("json", '```json\n{"type": "type", "text": "漢 \\"q\\""}\n```', Action("type", text='漢 "q"')),
    ("coordinates", "100 200 click", Action("click", x=100, y=200)),
    ("coordinates", '"a b" type', Action("type", text="a b")),
    ("coordinates", "navigate_back", Action("navigate_back")),
    # By hand: 512 of 1024 is the middle, 100 / 1024 of 1280 is 125.
    ("loc", "<loc0512><loc0100> click", Action("click", x=125, y=400)),
    ("loc", "<loc1023><loc1023> move", Action("move", x=1279, y=799)),
    ("loc", "<loc0512><loc0100> 2 long_press", Action("long_press", x=125, y=400, seconds=2.0)),
    (
        "loc",
        "<loc0000><loc0100><loc0512><loc0000> drag",
        Action("drag", x=125, y=0, x2=0, y2=400),
    ),
    ("loc", "down 5 scroll", Action("scroll", direction="down", amount=5)),
    (
        "loc",
        "down 5 <loc0512><loc0100> scroll",
        Action("scroll", direction="down", amount=5, x=125, y=400),
    ),
    ("loc", '"<loc0001><loc0002> click" type', Action("type", text="<loc0001><loc0002> click")),
    ("loc", "navigate_back", Action("navigate_back")),
    ("loc_1000", "<loc_97><loc_500> click", Action("click", x=125, y=400)),
    ("loc_1000", "<loc_999><loc_999> move", Action("move", x=1279, y=800 - 1)),
    (
        "loc_1000",
        "<loc_97><loc_0><loc_0><loc_500> drag",
        Action("drag", x=125, y=0, x2=1, y2=400),
    ),
    # By hand: bin 6 of 64 is from 120 to 140 of 1280, bin 32 from 400 to 412.5 of 800.
    ("points_64", "<x_6><y_32> click", Action("click", x=130, y=406)),
    ("points_64", "<x_63><y_63> move", Action("move", x=1270, y=794)),
    ("points_32", "<x_3><y_16> 2 long_press", Action("long_press", x=140, y=412, seconds=2.0)),
    ("points_32", "<x_3><y_0><x_0><y_16> drag", Action("drag", x=140, y=12, x2=20, y2=412)),
    (
        "points_64",
        "up 5 <x_6><y_32> scroll",
        Action("scroll", x=130, y=406, direction="up", amount=5),
    ),
    ("points_64", '"<x_1><y_2> click" type', Action("type", text="<x_1><y_2> click")),
    ("loc_1000", '"<loc_1><loc_2> click" type', Action("type", text="<loc_1><loc_2> click")),
    (
        "mobile_use",
        tool_call(
            "mobile_use",
            '{"action": "click", "coordinate": [500, 999]}',
            'Thought: I need\nthe bar.\n\nAction: "Tap it."\n',
        ),
        Action("click", x=641, y=799),
    ),
    (
        "mobile_use",
        tool_call("mobile_use", '{"action": "type", "text": "</tool_call> \\n 世界"}'),
        Action("type", text="</tool_call> \n 世界"),
    ),
    (
        "mobile_use",
        tool_call("mobile_use", '{"action": "system_button", "button": "Back"}'),
        Action("navigate_back"),
    ),
    (
        "mobile_use",
        tool_call(
            "mobile_use",
            '{"action": "swipe", "coordinate": [0, 0], "coordinate2": [999, 999]}',
        ),
        Action("drag", x=0, y=0, x2=1279, y2=799),
    ),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "left_click", "coordinate": [644, 406]}'),
        Action("click", x=640, y=400),
    ),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "key", "keys": ["Control", "c"]}'),
        Action("keys", keys="ctrl+c"),
    ),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "middle_click", "coordinate": [644, 406]}'),
        Action("middle_click", x=640, y=400),
    ),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "scroll", "pixels": -300}'),
        Action("scroll", direction="down", amount=300),
    ),
    (
        "computer_use_1000",
        tool_call("computer_use", '{"action": "hscroll", "coordinate": [500, 500], "pixels": 5}'),
        Action("scroll", direction="right", amount=5, x=640, y=400),
    ),
    (
        "ui_tars",
        f"Thought: Two\n\nlines. Action: no.\nAction: click(start_box='{box(644, 406)}')",
        Action("click", x=640, y=400),
    ),
    (
        "ui_tars",
        f"Reflection: wrong.\nAction_Summary: go on.\nAction: left_double(start_box='{box(0, 0)}')",
        Action("double_click", x=0, y=0),
    ),
    ("ui_tars", "Action: click(start_box='(644,406)')", Action("click", x=640, y=400)),
    ("ui_tars", "click(point='<point>644 406</point>')", Action("click", x=640, y=400)),
    ("ui_tars", "Action: click(start_box='[640, 400, 648, 412]')", Action("click", x=640, y=400)),
    (
        "ui_tars",
        f"Action: drag(start_box='{box(0, 0)}', end_box='{box(1288, 812)}')",
        Action("drag", x=0, y=0, x2=1279, y2=799),
    ),
    ("ui_tars", "Action: hotkey(key='ctrl c')", Action("keys", keys="ctrl+c")),
    ("ui_tars", "Action: hotkey(key='ctrl+Return')", Action("keys", keys="ctrl+enter")),
    ("ui_tars", r"Action: hotkey(key='ctrl \'')", Action("keys", keys="ctrl+'")),
    ("ui_tars", r"Action: type(content='a\'b\"c\\n\n')", Action("type", text="a'b\"c\\n\n")),
    ("ui_tars", "Action: type(content='it's 漢')", Action("type", text="it's 漢")),
    (
        "ui_tars",
        f"Action: scroll(start_box='{box(644, 406)}', direction='down')",
        Action("scroll", direction="down", amount=300, x=640, y=400),
    ),
    ("ui_tars", "Action: wait()", Action("wait", seconds=5.0)),
    (
        "ui_tars",
        "Thought: done\nAction: finished(content='x')",
        Action("terminate", text="success"),
    ),
    ("ui_tars", "Action: call_user()", Action("terminate", text="failure")),
]

# format, text, a part of the reason that must be told
REFUSED = [
    ("json", "[1, 2]", "expected an object"),
    ("json", '{"x": 1}', '0 of "type"'),
    ("json", '{"type": "wait", "seconds": 1} {"type": "wait", "seconds": 1}', "Extra data"),
    ("json", '{"type": "wait", "seconds": 1} is my answer', "Extra data"),
    ("json", "I wait {as told}", "is not JSON (Expecting property name"),
    ("json", '{"type": "click", "action": "click", "x": 1, "y": 2}', '2 of "type"'),
    ("json", '{"type": "click", "x": 1, "x": 2, "y": 3}', "the key 'x' twice"),
    ("json", '{"type": "click", "x": NaN, "y": 2}', "holds NaN"),
    ("json", '{"type": "click", "x": 1e999, "y": 2}', "1e999, which is infinite"),
    ("json", '{"type": "click", "x": 1e300, "y": 2}', "off the screen"),
    ("json", '{"type": "scroll", "direction": "up", "amount": 1e300}', "not a whole number"),
    ("json", '{"type": "wait", "seconds": 1e300}', "outside 0-60"),
    ("json", '{"type": "click", "x": ' + "9" * 5000 + ', "y": 2}', "5000 digits"),
    ("json", "[" * 20000, "deeper than 16"),
    ("json", '{"type": ' + "[" * 40 + "]" * 40 + "}", "deeper than 16"),
    ("json", '{"type": "click", "x": true, "y": 2}', "not a whole number"),
    ("json", '{"type": "click", "x": "1", "y": 2}', "not a whole number"),
    ("json", '{"type": "click", "x": 1, "y": 2, "z": 3}', "takes no 'z'"),
    ("json", '{"type": ["click"]}', "unknown action"),
    ("json", '{"type": "type", "text": "\\ud800"}', "lone surrogate"),
    ("coordinates", "100 200", "not an action"),
    ("loc", "100 200 click", "0 places, expected 1"),
    ("loc", "<loc0512> 5 click", "not a whole number"),
    ("loc", "<loc0512><loc0100><loc0512><loc0100> click", "4 arguments"),
    ("loc", "<loc0512><loc0100> 5 6 drag", "1 places, expected 2"),
    ("loc", "down 5 6 7 scroll", "0 places, expected 1"),
    ("loc", "<loc1024><loc0000> click", "y=1024 is off the screen, allowed: 0-1023"),
    ("loc", "<loc0512><loc0100>", "not an action"),
    ("points_64", "<x_64><y_0> click", "x=64 is off the screen, allowed: 0-63"),
    ("points_64", "<y_6><x_32> click", "1 arguments"),
    ("points_32", "<x_6> click", "1 arguments"),
    ("loc_1000", "100 200 click", "0 places, expected 1 like <loc_100><loc_512>"),
    ("loc_1000", "<loc0512><loc0100> click", "1 arguments"),
    ("loc_1000", "<loc_0><loc_1000> click", "y=1000 is off the screen, allowed: 0-999"),
    ("coordinates", "100, 200 click", "not a whole number"),
    ("coordinates", "1 2 3 click", "3 arguments"),
    ("mobile_use", '{"name": "mobile_use"}', "does not end in <tool_call>"),
    ("mobile_use", "<tool_call>{}</tool_call> and", "does not end in"),
    ("mobile_use", "<tool_call>{}</tool_call>", "is not a call"),
    (
        "mobile_use",
        tool_call("computer_use", '{"action": "wait", "time": 1}'),
        "expected mobile_use",
    ),
    ("mobile_use", tool_call("mobile_use", '{"action": "open", "text": "X"}'), "knows no action"),
    ("mobile_use", tool_call("mobile_use", '{"action": "click"}'), "lacks an argument"),
    ("mobile_use", tool_call("mobile_use", '{"action": "click", "coordinate": [1]}'), "no [x, y]"),
    (
        "mobile_use",
        tool_call("mobile_use", '{"action": "click", "coordinate": [1000, 5]}'),
        "x=1000 is off the screen, allowed: 0-999",
    ),
    (
        "mobile_use",
        tool_call("mobile_use", '{"action": "click", "coordinate": ["1", 5]}'),
        "not a number",
    ),
    (
        "mobile_use",
        tool_call("mobile_use", '{"action": "click", "coordinate": [1.5, 5]}'),
        "not a whole number",
    ),
    ("computer_use", tool_call("computer_use", '{"action": "left_click"}'), "nowhere yet"),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "scroll", "pixels": 0}'),
        "not a number",
    ),
    (
        "computer_use",
        tool_call("computer_use", '{"action": "scroll", "pixels": 1e300}'),
        "outside 1-10000",
    ),
    ("computer_use", tool_call("computer_use", '{"action": "key", "keys": "c"}'), "not a list"),
    ("ui_tars", "Action: click(100, 200)", "not a list of name='value'"),
    ("ui_tars", "Action: click(start_box='(1,2,3)')", "not a point"),
    ("ui_tars", f"Action: click(start_box='{box(1289, 0)}')", "allowed: 0-1288"),
    ("ui_tars", "Action: __import__('os').system('x')", "unknown action"),
    ("ui_tars", "Action: open_app(app_name='x')", "unknown action"),
    ("ui_tars", "Action: type()", "lacks content"),
    ("ui_tars", "Action: hotkey()", "lacks key"),
    ("ui_tars", "Action: hotkey(content='a')", "is not key='...'"),
    (
        "ui_tars",
        f"Action: click(start_box='{box(1, 1)}')\n\nclick(start_box='{box(2, 2)}')",
        "not a list of name='value'",
    ),
]


@pytest.mark.parametrize(("name", "text", "action"), READ)
def test_parse_text_of_a_model_gives_its_action(name, text, action):
    fmt = actions.find_format(name)
    assert actions.parse(text, SCREEN, fmt, image_size=IMAGE) == action


@pytest.mark.parametrize(("name", "text", "reason"), REFUSED)
def test_parse_other_text_raises_with_the_reason(name, text, reason):
    with pytest.raises(ActionError) as caught:
        actions.parse(text, SCREEN, actions.find_format(name), image_size=IMAGE)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["mobile_use", "computer_use", "computer_use_1000"])
def test_tool_every_action_of_its_prompt_is_read(name):
    prompt = actions.find_format(name).prompt("0-1000").system
    tool = json.loads(prompt.partition("<tools>\n")[2].partition("\n</tools>")[0])["function"]
    words = tool["parameters"]["properties"]["action"]["enum"]
    arguments = {"coordinate": [1, 2], "coordinate2": [3, 4], "text": "a", "keys": ["a"]}
    arguments |= {"pixels": 5, "time": 1, "status": "success", "button": "Home"}
    assert len(words) > 7
    for word in words:
        call = {"name": tool["name"], "arguments": {"action": word, **arguments}}
        text = tool_call(tool["name"], json.dumps(call["arguments"]))
        actions.parse(text, SCREEN, actions.find_format(name), cursor=(5, 5))


def test_computer_use_clicks_and_drags_from_where_the_cursor_is():
    fmt = actions.find_format("computer_use")
    moved = Action("move", x=10, y=20)
    drag = Action("drag", x=10, y=20, x2=1279, y2=30)
    cursor = actions.cursor_after([None, moved, Action("wait", seconds=1.0)])
    assert cursor == (10, 20)
    text = actions.format_action(drag, SCREEN, fmt, cursor=cursor)
    assert actions.parse(text, SCREEN, fmt, cursor=cursor) == drag
    assert actions.cursor_after([moved, drag]) == (1279, 30)
    click = tool_call("computer_use", '{"action": "left_click"}')
    assert actions.parse(click, SCREEN, fmt, cursor=cursor) == Action("click", x=10, y=20)
    with pytest.raises(ActionError, match="move it to"):
        actions.format_action(drag, SCREEN, fmt, cursor=(1, 1))


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("ui_tars", Action("triple_click", x=1, y=2)),
        ("ui_tars", Action("wait", seconds=1.0)),
        ("ui_tars", Action("scroll", direction="up", amount=1)),
        ("mobile_use", Action("keys", keys="ctrl+c")),
        ("mobile_use", Action("right_click", x=1, y=2)),
        ("computer_use", Action("system_button", text="home")),
    ],
)
def test_format_action_that_the_format_cannot_say_is_refused(name, action):
    with pytest.raises(ActionError):
        actions.format_action(action, SCREEN, actions.find_format(name))


@st.composite
def _said(draw, max_extent_px: int, *, within_units: bool = False):
    """(format, screen, image, action that the format can say).

    Args: within_units: no axis has more pixels than the format's space has bins.
    """
    fmt = actions.find_format(draw(st.sampled_from(sorted(actions.FORMATS))))
    if draw(st.booleans()) and not fmt.own_space:
        fmt = actions.find_format(fmt.name, draw(st.sampled_from(actions.SPACES)))
    if within_units:
        max_extent_px = min(max_extent_px, BINS.get(fmt.coordinates, max_extent_px))
    screen = (draw(st.integers(1, max_extent_px)), draw(st.integers(1, max_extent_px)))
    image = tuple(extent + draw(st.integers(0, 28)) for extent in screen)
    action = draw(any_action(*screen).filter(lambda action: action.kind in fmt.kinds))
    if fmt.name == "ui_tars" and action.kind == "wait":
        action = Action("wait", seconds=5.0)
    if fmt.name == "ui_tars" and action.kind == "scroll":
        action = Action("scroll", x=action.x, y=action.y, direction=action.direction, amount=300)
    if fmt.name == "ui_tars" and action.kind == "system_button":
        action = Action("system_button", text="home")
    if fmt.name == "mobile_use" and action.kind == "keys":
        action = Action("keys", keys="enter")
    return fmt, screen, image, action


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(_said(999, within_units=True))
def test_round_trip_is_exact_where_the_space_has_a_unit_for_every_pixel(case):
    fmt, screen, image, action = case
    cursor = (action.x, action.y)
    text = actions.format_action(action, screen, fmt, image_size=image, cursor=cursor)
    for before in ("", "Thought: hm\n\n") if fmt.markers and fmt.name not in BINS else ("",):
        back = actions.parse(before + text, screen, fmt, image_size=image, cursor=cursor)
        assert back == action


@QUICK
@hypothesis.given(_said(8000))
def test_round_trip_on_a_larger_screen_is_exact_from_the_second_time_on(case):
    fmt, screen, image, action = case

    def there_and_back(action):
        cursor = (action.x, action.y)
        text = actions.format_action(action, screen, fmt, image_size=image, cursor=cursor)
        return actions.parse(text, screen, fmt, image_size=image, cursor=cursor)

    once = there_and_back(action)
    # The cursor is where it was told to be; only what the text says is rounded.
    assert there_and_back(once) == once


@pytest.mark.parametrize("space", actions.SPACES)
def test_convert_agrees_with_exact_arithmetic_at_every_pixel(space):
    from fractions import Fraction

    for screen_px, image_px in ((1280, 1288), (800, 812), (3120, 1092), (1, 28), (224, 224)):
        edge = {"pixels": screen_px, "image": image_px, "0-999": 999, "0-1000": 1000, "0-1": 1}
        edge |= {"loc": 1024, "loc_1000": 1000, "points_32": 32, "points_64": 64}
        for pixel in range(screen_px):
            said = convert(pixel, space, screen_px, image_px, to_screen=False)
            exact = Fraction(pixel) * edge[space] / screen_px
            if space == "loc":  # the far edge has no bin
                exact = min(exact, Fraction(1023))
            if space in ("loc_1000", "points_32", "points_64"):
                assert said == exact // 1
                exact = Fraction(said)
            assert abs(Fraction(said) - exact) <= (Fraction(1, 2) if space != "0-1" else 0.0001)
            back = convert(said, space, screen_px, image_px, to_screen=True)
            units = 10_000 if space == "0-1" else edge[space]
            assert abs(back - pixel) <= (0 if units >= screen_px else screen_px / units / 2 + 0.5)
            assert 0 <= back < screen_px


SCREENS = [(1280, 800), (1920, 1080), (1024, 768), (1, 1), (2048, 1536), (390, 844), (360, 800),
           (1366, 768), (160, 210), (768, 1024)]  # fmt: skip


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["loc", "loc_1000"])
def test_loc_pixel_to_text_and_back_is_within_a_pixel(name, screen):
    fmt = actions.find_format(name)
    for step in range(1001):
        x, y = (round((extent - 1) * step / 1000) for extent in screen)
        for action in (Action("click", x=x, y=y), Action("drag", x=x, y=y, x2=0, y2=screen[1] - 1)):
            text = actions.format_action(action, screen, fmt)
            back = actions.parse(text, screen, fmt)
            assert max(abs(back.x - x), abs(back.y - y)) <= 1
            assert text == actions.format_action(back, screen, fmt)


@pytest.mark.parametrize("extent_px", [1, 7, 390, 768, 1000, 1001, 1280, 1920, 4000])
def test_loc_1000_bins_and_their_middles_are_those_of_transformers(extent_px):
    """Florence2PostProcessor.quantize and dequantize."""
    torch = pytest.importorskip("torch")
    processing = pytest.importorskip("transformers.models.florence2.processing_florence2")
    reference = object.__new__(processing.Florence2PostProcessor)
    reference.quantize_bins = (1000, 1000)
    # A little more than whole pixels: on edges of bins the reference's floats fall on either side.
    middles = torch.arange(extent_px, dtype=torch.float64)[:, None] + torch.tensor([1e-6, 1e-6])
    bins = reference.quantize(middles, (extent_px, extent_px))
    places = reference.dequantize(bins, (extent_px, extent_px))
    for pixel in range(extent_px):
        said = convert(pixel, "loc_1000", extent_px, 768, to_screen=False)
        assert said == bins[pixel, 0]
        back = convert(said, "loc_1000", extent_px, 768, to_screen=True)
        # The reference cuts the middle down to a pixel; here it is the next one.
        assert places[pixel, 0] <= back <= places[pixel, 0] + 1


def test_prompt_of_points_shows_every_kind_as_it_is_written():
    fmt = actions.find_format("points_64")
    lines = fmt.prompt("points_64").template.splitlines()
    for usage in (
        "<x_N><y_N> click",
        "<x_N><y_N><x_N><y_N> drag",
        "direction amount [<x_N><y_N>] scroll",
        '"text" type',
    ):
        assert usage in lines
    assert "bins N from 0 to 63" in lines[-2] and len(lines) == len(actions.KINDS) + 3
    drag = actions.format_action(Action("drag", x=1, y=2, x2=3, y2=4), SCREEN, fmt)
    assert drag == "<x_0><y_0><x_0><y_0> drag"


def test_loc_in_another_space_is_refused():
    with pytest.raises(ConfigError, match=r"coordinates='0-999', but action_format='loc' writes"):
        actions.find_format("loc", "0-999")
    assert actions.find_format("loc", "loc") == actions.find_format("loc")


def _mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        cut = rng.randint(0, 3)
        junk = "".join(rng.choice("()[]{}'\"<>|,.:\\\n 09ax漢\ud800\x00") for _ in range(cut))
        text = text[:at] + junk + text[at + rng.randint(0, 3) :]
    return text


@pytest.mark.parametrize("name", sorted(actions.FORMATS))
def test_10000_random_texts_raise_nothing_but_action_error(name):
    fmt, rng = actions.find_format(name), random.Random(6)
    texts = [text for own, text, _ in READ if own == name] or ["click(1, 2)", 'type("a")']
    actions_read = 0
    for number in range(10_000):
        if number % 2:
            text = "".join(chr(rng.randrange(0x10000)) for _ in range(rng.randrange(40)))
        else:
            text = _mutated(rng.choice(texts), rng)
        try:
            action = actions.parse(text, SCREEN, fmt, image_size=IMAGE, cursor=(3, 4))
        except ActionError as error:
            assert "\n" not in str(error)
        else:
            actions.validate(action, SCREEN)
            actions_read += 1
    assert actions_read > 50  # mutations that leave an action: the other path is taken too


@pytest.mark.parametrize("name", sorted(actions.FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        "Action: click(start_box='<point>1" + " " * 20_000 + "x</point>')",
        "```" + " " * 20_000 + "x",
        "Action: type(content='" + "' " * 10_000,
        "<tool_call>" + "{" * 20_000 + "</tool_call>",
        "Action:" * 3_000,
        '"' + "\\" * 20_000 + " type",
        "a " * 10_000 + "click",
    ],
    ids=range(7),
)
def test_parse_long_hostile_text_takes_no_time(name, text):
    started = np.datetime64("now")
    with pytest.raises(ActionError):
        actions.parse(text, SCREEN, actions.find_format(name), image_size=IMAGE)
    assert np.datetime64("now") - started < np.timedelta64(10, "s")
