"""What a person did on the recorder's page, and the action that it is."""

import re

import pytest

from tools.recorder import gestures
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

SCREEN = (224, 168)
MOUSE = {"kind": "mouse", "button": "left", "clicks": 1, "held_s": 0.1, "x": 9, "y": 8}
MOUSE |= {"x2": 9, "y2": 8}
KEY = {"kind": "key", "key": "a", "code": "KeyA", "modifiers": []}
WHEEL = {"kind": "wheel", "x": 9, "y": 8, "dx": 0, "dy": 0}


@pytest.mark.parametrize(
    ("gesture", "expected"),
    [
        (MOUSE, Action("click", x=9, y=8)),
        (MOUSE | {"clicks": 2}, Action("double_click", x=9, y=8)),
        (MOUSE | {"clicks": 3}, Action("triple_click", x=9, y=8)),
        (MOUSE | {"button": "right"}, Action("right_click", x=9, y=8)),
        (MOUSE | {"x2": 40}, Action("drag", x=9, y=8, x2=40, y2=8)),
        (MOUSE | {"x2": 40, "held_s": 3.0}, Action("drag", x=9, y=8, x2=40, y2=8)),
        (MOUSE | {"held_s": 1.2345}, Action("long_press", x=9, y=8, seconds=1.2)),
        (WHEEL | {"dy": 240}, Action("scroll", direction="down", amount=200, x=9, y=8)),
        (WHEEL | {"dy": -3}, Action("scroll", direction="up", amount=100, x=9, y=8)),
        (WHEEL | {"dx": 300, "dy": 9}, Action("scroll", direction="right", amount=300, x=9, y=8)),
        ({"kind": "text", "text": "Ada L."}, Action("type", text="Ada L.")),
        (KEY | {"modifiers": ["ctrl"]}, Action("keys", keys="ctrl+a")),
        (KEY | {"key": "A", "modifiers": ["shift", "ctrl"]}, Action("keys", keys="ctrl+shift+a")),
        (
            KEY | {"key": "!", "code": "Digit1", "modifiers": ["ctrl", "shift"]},
            Action("keys", keys="ctrl+shift+1"),
        ),
        (
            KEY | {"key": " ", "code": "Space", "modifiers": ["alt"]},
            Action("keys", keys="alt+space"),
        ),
        (KEY | {"key": "Enter", "code": "Enter"}, Action("keys", keys="enter")),
        (KEY | {"key": "ArrowDown", "code": "ArrowDown"}, Action("keys", keys="down")),
        (KEY | {"key": "PageUp", "code": "PageUp"}, Action("keys", keys="pageup")),
        (KEY | {"modifiers": ["meta"]}, Action("keys", keys="win+a")),
        ({"kind": "words", "text": "wait(1.5)"}, Action("wait", seconds=1.5)),
        ({"kind": "words", "text": "terminate(success)"}, Action("terminate", text="success")),
    ],
)
def test_gesture_is_the_action_that_it_looks_like(gesture, expected):
    assert gestures.read(gesture, SCREEN) == expected


@pytest.mark.parametrize(
    ("gesture", "reason"),
    [
        ({}, "gesture of kind 'None'"),
        ({"kind": ["mouse"]}, "gesture of kind"),
        (MOUSE | {"x": 224, "x2": 224}, "x=224 is off the screen"),
        (MOUSE | {"x": 1.5}, "x is '1.5', expected a whole number"),
        (MOUSE | {"y": True}, "y is 'True'"),
        (MOUSE | {"clicks": 4}, "4 clicks"),
        (MOUSE | {"held_s": 90.0}, "seconds=90.0 is outside"),
        (WHEEL, "nothing was scrolled"),
        ({"kind": "text", "text": ""}, "expected some text"),
        ({"kind": "text", "text": "\x1b"}, "which no key types"),
        (KEY | {"key": "AudioPlay", "code": "AudioPlay"}, "is not a key"),
        (KEY | {"modifiers": ["hyper"]}, "modifiers are"),
        ({"kind": "words", "text": "__import__('os')"}, "unknown action '__import__'"),
    ],
)
def test_gesture_that_is_no_action_is_refused(gesture, reason):
    with pytest.raises(ActionError, match=re.escape(reason)):
        gestures.read(gesture, SCREEN)
