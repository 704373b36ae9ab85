"""The text format against hand-written cases, its bounds, and round trips in two spaces."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.any_action import any_action
from uirl_jax import actions
from uirl_jax.errors import ActionError, ConfigError
from uirl_jax.types import Action

SCREEN = (1280, 800)
THOUSANDTHS = actions.find_format("text", "0-1000")
QUICK = hypothesis.settings(deadline=None)  # a busy machine is no failure

# text, and the action that it stands for in pixels
CANONICAL = [
    ("click(100, 200)", Action("click", x=100, y=200)),
    ("click(0, 0)", Action("click", x=0, y=0)),
    ("click(1279, 799)", Action("click", x=1279, y=799)),
    ("double_click(1, 2)", Action("double_click", x=1, y=2)),
    ("triple_click(1, 2)", Action("triple_click", x=1, y=2)),
    ("right_click(1, 2)", Action("right_click", x=1, y=2)),
    ("middle_click(1, 2)", Action("middle_click", x=1, y=2)),
    ("move(1, 2)", Action("move", x=1, y=2)),
    ("long_press(1, 2)", Action("long_press", x=1, y=2)),
    ("long_press(1, 2, 1.5)", Action("long_press", x=1, y=2, seconds=1.5)),
    ("drag(1, 2, 3, 4)", Action("drag", x=1, y=2, x2=3, y2=4)),
    ('type("hello")', Action("type", text="hello")),
    ('type("")', Action("type", text="")),
    (r'type("a \"b\", (c)\\\n\t")', Action("type", text='a "b", (c)\\\n\t')),
    ('type("naïve 漢字 😀")', Action("type", text="naïve 漢字 😀")),
    ("keys(enter)", Action("keys", keys="enter")),
    ("keys(ctrl+c)", Action("keys", keys="ctrl+c")),
    ("keys(ctrl+shift+,)", Action("keys", keys="ctrl+shift+,")),
    ("keys(ctrl)", Action("keys", keys="ctrl")),
    ("scroll(down, 100)", Action("scroll", direction="down", amount=100)),
    ("scroll(up, 100, 5, 6)", Action("scroll", direction="up", amount=100, x=5, y=6)),
    ("wait(2)", Action("wait", seconds=2.0)),
    ("wait(0.125)", Action("wait", seconds=0.125)),
    ("navigate_back()", Action("navigate_back")),
    ("system_button(home)", Action("system_button", text="home")),
    ('answer("42 €")', Action("answer", text="42 €")),
    ("terminate(success)", Action("terminate", text="success")),
    ("terminate(failure)", Action("terminate", text="failure")),
]

# text, and a part of the reason that must be told
REFUSED = [
    ("", "not an action"),
    ("click", "not an action"),
    ("click(1, 2", "not an action"),
    ("click(1, 2) now", "not an action"),
    ("click(1, 2)\nclick(3, 4)", "expected click(x, y)"),
    ("click (1, 2)", "not an action"),
    ("Click(1, 2)", "not an action"),
    ("__import__('os')", "unknown action"),
    ("fly(1, 2)", "unknown action 'fly'"),
    ("click()", "0 arguments"),
    ("click(1)", "1 arguments, expected click(x, y)"),
    ("click(1, 2, 3)", "3 arguments"),
    ("click(1, )", "not a whole number"),
    ("click(1.5, 2)", "not a whole number"),
    ("click(1e2, 2)", "not a whole number"),
    ("click(nan, 2)", "not a whole number"),
    ("click(0x10, 2)", "not a whole number"),
    ("click(1_0, 2)", "not a whole number"),
    ("click(١٢, 2)", "not a whole number"),  # Arabic digits, which int() would take
    ("click(99999999999999999999, 2)", "not a whole number"),
    ("click(+1, 2)", "not a whole number"),
    ("click(x=1, y=2)", "not a whole number"),
    ("click(1280, 2)", "x=1280 is off the screen, allowed: 0-1279"),
    ("click(2, 800)", "y=800 is off the screen, allowed: 0-799"),
    ("click(-1, 2)", "x=-1 is off the screen"),
    ("drag(1, 2, 3, 800)", "y2=800 is off the screen"),
    ("long_press(1, 2, 61)", "outside 0-60"),
    ("scroll(down)", "expected scroll(direction, amount[, x, y])"),
    ("scroll(down, 1, 2)", "3 arguments"),
    ("scroll(sideways, 1)", "none of up, down, left, right"),
    ("scroll(down, 0)", "outside 1-10000"),
    ("scroll(down, 10001)", "outside 1-10000"),
    ("scroll(down, 1, 2000, 3)", "off the screen"),
    ("wait(nan)", "not a number"),
    ("wait(inf)", "not a number"),
    ("wait(1e308)", "not a number"),
    ("wait(-1)", "not a number"),
    ("wait(0.1234)", "not a number"),
    ("wait(60.001)", "outside 0-60"),
    ("wait()", "0 arguments"),
    ("type(hello)", "not text in quotes"),
    ('type("a" + "b")', "not text in quotes"),
    ('type("a\nb")', "not text in quotes"),
    (r'type("\x41")', "not text in quotes"),
    (r'type("\ud800")', "no key types"),
    (r'type("\u0000")', "no key types"),
    (r'type("\u001b[31m")', "no key types"),
    ("keys()", "0 arguments"),
    ("keys(ctrl+)", "'' is not a key"),
    ("keys(ctrl+C)", "'C' is not a key"),
    ("keys(c+ctrl)", "stand before a key"),
    ("keys(ctrl+ctrl)", "distinct"),
    ("keys(ctrl+alt+shift+win+a)", "at most 4"),
    ("keys(ctrl + c)", "is not a key"),
    ("navigate_back(1)", "1 arguments, expected navigate_back()"),
    ("terminate(won)", "none of success, failure"),
    ("system_button(back)", "none of home, menu"),
    ("click(1, 2) click(3, 4)", "3 arguments"),
    ('type("a")\nkeys(enter)', "not text in quotes"),
    ("I press move(1, 2) and then click(3, 4)", "3 arguments"),
    ("click(1, 2) is my answer", "is not an action"),
    ("click(1, 2)\n```", "is not an action"),
    ("```\nclick(1, 2)\n```\n```\nclick(3, 4)\n```", "3 arguments"),
    ("keys(ctrl+'c')", "is not a key"),
    ("type('it's')", "not text in quotes"),
]
CLICK = Action("click", x=1, y=2)
# What models write that were never trained on the format.
ACCEPTED = [
    ("I will click the button. click(1, 2)", CLICK),
    ("The button is on the left.\n\nclick(1, 2)", CLICK),
    ("```\nclick(1, 2)\n```", CLICK),
    ("I click (the) button:\n```python\nclick(1, 2)\n```", CLICK),
    ('keys("ctrl+c")', Action("keys", keys="ctrl+c")),
    ("keys('enter')", Action("keys", keys="enter")),
    ("keys(')", Action("keys", keys="'")),
    ("""keys("'")""", Action("keys", keys="'")),
    ('scroll("down", 100)', Action("scroll", direction="down", amount=100)),
    ("terminate('success')", Action("terminate", text="success")),
    ("type('hello')", Action("type", text="hello")),
    (r"type('it\'s \\ \"a\" \u00e9')", Action("type", text='it\'s \\ "a" é')),
    ("""type('say "click(1, 2)"')""", Action("type", text='say "click(1, 2)"')),
    ('I type("click(3, 4)")', Action("type", text="click(3, 4)")),
    ('type("```")', Action("type", text="```")),
]


@pytest.mark.parametrize(("text", "action"), CANONICAL)
def test_parse_canonical_text_gives_the_action_and_prints_back(text, action):
    assert actions.parse(text, SCREEN) == action
    assert actions.format_action(action, SCREEN) == text


def test_canonical_cases_cover_every_kind():
    assert {action.kind for _, action in CANONICAL} == set(actions.KINDS)


@pytest.mark.parametrize(("text", "action"), ACCEPTED)
def test_parse_answer_of_an_untuned_model_gives_its_one_action(text, action):
    assert actions.parse(text, SCREEN) == action


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_parse_other_text_raises_with_the_reason(text, reason):
    with pytest.raises(ActionError) as caught:
        actions.parse(text, SCREEN)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parse_white_space_around_and_between_arguments_is_tolerated():
    assert actions.parse(" \n click( 1 ,2)\n", SCREEN) == Action("click", x=1, y=2)
    assert actions.parse('type( "a" )', SCREEN) == Action("type", text="a")


def test_parse_surrogate_pair_escape_gives_one_character():
    assert actions.parse(r'type("\ud83d\ude00")', SCREEN).text == "😀"


def test_parse_text_at_the_length_cap_passes_and_one_more_is_refused():
    cap = actions.MAX_TEXT_CHARS
    assert actions.parse(f'type("{"a" * cap}")', SCREEN).text == "a" * cap
    assert actions.parse('type("' + r"\u0061" * cap + '")', SCREEN).text == "a" * cap
    with pytest.raises(ActionError, match=f"{cap + 1} characters"):
        actions.parse(f'type("{"a" * (cap + 1)}")', SCREEN)
    with pytest.raises(ActionError, match="an action has at most"):
        actions.parse("x" * 10_000_000, SCREEN)


def test_parse_long_hostile_text_keeps_the_message_short():
    with pytest.raises(ActionError) as caught:
        actions.parse('type("' + '\\"' * 10_000, SCREEN)
    assert len(str(caught.value)) < 200


# Worked by hand: 500/1000 of 1280 is 640; 1 of 800 is 0.8, so 1; 1000 is the last pixel.
@pytest.mark.parametrize(
    ("text", "x", "y"),
    [
        ("click(0, 0)", 0, 0),
        ("click(500, 1)", 640, 1),
        ("click(999, 999)", 1279, 799),
        ("click(1000, 1000)", 1279, 799),
    ],
)
def test_parse_thousandths_gives_pixels_of_the_screen(text, x, y):
    assert actions.parse(text, SCREEN, THOUSANDTHS) == Action("click", x=x, y=y)


def test_parse_thousandths_beyond_the_screen_names_the_models_own_space():
    with pytest.raises(ActionError, match="x=1001 is off the screen, allowed: 0-1000"):
        actions.parse("click(1001, 5)", SCREEN, THOUSANDTHS)
    with pytest.raises(ActionError, match="y=-1 is off the screen"):
        actions.parse("click(5, -1)", SCREEN, THOUSANDTHS)


def test_parse_thousandths_leaves_scroll_amounts_alone():
    action = actions.parse("scroll(down, 100, 500, 500)", SCREEN, THOUSANDTHS)
    assert action == Action("scroll", direction="down", amount=100, x=640, y=400)


def test_unknown_format_or_coordinate_space_raises_config_error():
    with pytest.raises(ConfigError, match="expected one of text, json"):
        actions.find_format("txt")
    with pytest.raises(ConfigError, match="0-1000"):
        actions.find_format("text", "0-2000")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action("fly"), "unknown action"),
        (Action("click", x=1), "lacks an argument"),
        (Action("click", x=1, y=2, text="a"), "takes no text"),
        (Action("terminate", text="success", x=1, y=2), "takes no x, y"),
        (Action("scroll", direction="up", amount=1, x=1), "lacks an argument"),
        (Action("click", x=1280, y=2), "off the screen"),
        (Action("click", x=1.0, y=2), "not a whole number"),
        (Action("click", x=True, y=2), "not a whole number"),
        (Action("wait", seconds=math.nan), "outside"),
        (Action("wait", seconds=math.inf), "outside"),
        (Action("wait", seconds=1 / 3), "more than 3 decimals"),
        (Action("wait", seconds=10**400), "outside"),
        (Action("wait", seconds="2"), "not a number"),
        (Action("click", x=10**400, y=2), "off the screen"),
        (Action("type", text=5), "not text"),
        (Action("scroll", direction=["up"], amount=1), "not text"),
        (Action(["click"], x=1, y=2), "unknown action"),
        (Action("type", text="\x7f"), "no key types"),
    ],
)
def test_format_action_invalid_action_is_refused(action, reason):
    """Whatever JSON can put into the fields: the bundled server validates requests this way."""
    with pytest.raises(ActionError, match=reason) as caught:
        actions.format_action(action, SCREEN)
    assert len(str(caught.value)) < 250


def test_format_action_numpy_integers_print_as_plain_numbers():
    action = Action("click", x=np.int64(3), y=np.int32(4))
    assert actions.format_action(action, SCREEN) == "click(3, 4)"
    assert actions.format_action(action, SCREEN, THOUSANDTHS) == "click(2, 5)"


def test_usage_names_every_argument():
    assert actions.usage("scroll") == "scroll(direction, amount[, x, y])"
    assert actions.usage("type") == 'type("text")'
    assert actions.usage("navigate_back") == "navigate_back()"


@st.composite
def screen_and_action(draw, max_extent_px: int) -> tuple[tuple[int, int], Action]:
    screen = (draw(st.integers(1, max_extent_px)), draw(st.integers(1, max_extent_px)))
    return screen, draw(any_action(*screen))


@QUICK
@hypothesis.given(screen_and_action(8000))
def test_round_trip_in_pixels_is_exact(case):
    screen, action = case
    assert actions.parse(actions.format_action(action, screen), screen) == action


@QUICK
@hypothesis.given(screen_and_action(1000))
def test_round_trip_in_thousandths_is_exact_up_to_1000_pixels(case):
    screen, action = case
    text = actions.format_action(action, screen, THOUSANDTHS)
    assert actions.parse(text, screen, THOUSANDTHS) == action


@QUICK
@hypothesis.given(screen_and_action(8000))
def test_round_trip_in_thousandths_is_within_half_a_unit(case):
    screen, action = case
    back = actions.parse(actions.format_action(action, screen, THOUSANDTHS), screen, THOUSANDTHS)
    for name, axis in (("x", 0), ("y", 1), ("x2", 0), ("y2", 1)):
        before, after = vars(action)[name], vars(back)[name]
        if before is not None:  # half a unit, and half a pixel of rounding
            assert abs(before - after) <= screen[axis] / 2000 + 0.5


@QUICK
@hypothesis.given(st.text() | st.text(alphabet='clikdragtypewas()[]",.+-0123456789e \\\n'))
@hypothesis.example("click(" + "9" * 5000 + ", 1)")
@hypothesis.example('type("\ud800")')
def test_parse_junk_only_ever_raises_action_error(text):
    try:
        action = actions.parse(text, SCREEN)
    except ActionError as error:
        assert str(error)
    else:
        assert actions.parse(actions.format_action(action, SCREEN), SCREEN) == action


@QUICK
@hypothesis.given(st.sampled_from(sorted(actions.KINDS)), st.text(max_size=40))
def test_parse_junk_arguments_only_ever_raise_action_error(kind, body):
    try:
        action = actions.parse(f"{kind}({body})", SCREEN)
    except ActionError as error:
        assert str(error)
    else:
        actions.validate(action, SCREEN)
