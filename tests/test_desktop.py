"""The hermetic desktop: determinism, geometry, what actions do, rewards, and its demonstrators."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.tasks import drawing
from uirl_jax.verifiers.tasks.desktop import open_session, parse_variant, scripted_action

BUTTON, TEXT, SHEET = "desktop/click_button", "desktop/enter_text", "desktop/data_entry"
SETTINGS = [
    (BUTTON, ""),
    (BUTTON, "buttons=2"),
    (BUTTON, "buttons=6,by=label,popup=1,shift=1"),
    (TEXT, ""),
    (TEXT, "popup=1,shift=1"),
    (SHEET, ""),
    (SHEET, "rows=8,columns=3,popup=1,shift=1"),
    (SHEET, "rows=1,columns=1"),
]


def _open(name, seed=0, variant=""):
    return open_session(TaskSpec(name, seed, variant))


def _pixels(session):
    return np.asarray(session.screenshot())


def _click(box):
    return Action("click", x=(box[0] + box[2]) // 2, y=(box[1] + box[3]) // 2)


def _inside(action, box):
    return box[0] <= action.x < box[2] and box[1] <= action.y < box[3]


def _play(session, rng, quality=1.0, max_turns=200):
    turns = 0
    while not session.progress()["done"] and turns < max_turns:
        session.act(scripted_action(session, rng, quality))
        turns += 1
    return turns


@pytest.mark.parametrize(("name", "variant"), SETTINGS)
def test_session_of_equal_specs_gives_equal_pixels_and_instruction(name, variant):
    one, two, other = _open(name, 5, variant), _open(name, 5, variant), _open(name, 6, variant)
    assert one.instruction == two.instruction
    for _ in range(3):
        np.testing.assert_array_equal(_pixels(one), _pixels(two))
        action = scripted_action(one, np.random.default_rng(0))
        one.act(action)
        two.act(action)
    assert not np.array_equal(_pixels(_open(name, 5, variant)), _pixels(other))


def test_session_instances_stay_what_they_were_when_options_are_added():
    """The first held-out ones, as they were on 2026-11-21: success is compared across releases."""
    first = {"seed": 2**30, "max_turns": 1}
    click = open_session(TaskSpec("desktop/click_button", **first))
    assert (click.instruction, click.targets[click.goal]) == (
        "Click the red button.",
        (53, 79, 111, 111),
    )
    enter = open_session(TaskSpec("desktop/enter_text", **first))
    assert (enter.instruction, enter.targets["ok"]) == (
        "Type mint and press OK.",
        (66, 136, 121, 163),
    )


def test_session_in_another_process_gives_the_same_pixels():
    program = (
        "import hashlib; from uirl_jax.types import TaskSpec;"
        "from uirl_jax.verifiers.tasks.desktop import open_session;"
        "s = open_session(TaskSpec('desktop/click_button', 11));"
        "print(hashlib.sha256(s.screenshot().tobytes()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    here = hashlib.sha256(_open(BUTTON, 11).screenshot().tobytes()).hexdigest()
    assert done.stdout.strip() == here


@pytest.mark.parametrize(("name", "variant"), SETTINGS)
def test_scripted_action_without_mistakes_solves_every_task(name, variant):
    rng = np.random.default_rng(1)
    for seed in range(15):
        session = _open(name, seed, variant)
        _play(session, rng)
        progress = session.progress()
        assert progress["done"] is True
        assert progress["reward"] == 1.0


@pytest.mark.parametrize(("name", "variant"), SETTINGS)
def test_scripted_action_with_some_mistakes_ends_or_recovers(name, variant):
    rng = np.random.default_rng(2)
    rewards = []
    for seed in range(30):
        session = _open(name, seed, variant)
        _play(session, rng, quality=0.7, max_turns=400)
        assert session.progress()["done"] is True
        rewards.append(session.progress()["reward"])
    if name == BUTTON:
        assert 0.3 < np.mean(rewards) < 0.95
    elif name == TEXT:
        assert np.mean(rewards) == 1.0  # its mistakes hit nothing, so they only cost turns


def test_click_button_layout_is_apart_inside_and_covers_the_screen():
    centres = []
    for seed in range(200):
        session = _open(BUTTON, seed, f"buttons={2 + seed % 5}")
        pixels = _pixels(session)
        assert pixels.shape == (168, 224, 3)
        buttons = {k: v for k, v in session.targets.items() if not k.endswith("_plate")}
        assert len(buttons) == 2 + seed % 5
        boxes = list(session.targets.values())
        for name, (x0, y0, x1, y1) in buttons.items():
            assert 44 <= x1 - x0 <= 58 and 26 <= y1 - y0 <= 32
            plate = session.targets[f"{name}_plate"]
            assert plate[0] == x0 and plate[2] == x1 and plate[1] == y1 + 1
            assert 13 <= plate[3] - plate[1] <= 15
            # Solid, to the last pixel; its caption stands below it and not on it.
            assert (pixels[y0:y1, x0:x1] == drawing.BUTTON_COLORS[name]).all()
            plate_pixels = pixels[plate[1] : plate[3], plate[0] : plate[2]]
            assert (plate_pixels == drawing.PLATE_COLOR).all(-1).mean() > 0.5
            assert plate_pixels.min() < 80  # the word
            centres.append(((x0 + x1) / 2, (y0 + y1) / 2))
        for i, a in enumerate(boxes):
            assert a[0] >= 0 and a[1] >= 0 and a[2] <= 224 and a[3] <= 168
            for b in boxes[i + 1 :]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    counts, _, _ = np.histogram2d(
        *zip(*centres, strict=True), bins=[4, 3], range=[[30, 194], [20, 138]]
    )
    assert counts.min() > 0.3 * counts.mean()


def test_wallpaper_tells_places_apart_and_stays_away_from_the_buttons_colours():
    pixels = np.asarray(drawing.draw_screen(224, 168, [], {}, None, False)).astype(int)
    # 48 blocks of 28x28 pixels, what one visual token sees: no two of them look alike.
    blocks = pixels.reshape(6, 28, 8, 28, 3).transpose(0, 2, 1, 3, 4).reshape(48, -1)
    distances = np.abs(blocks[:, None] - blocks[None]).mean(axis=-1)
    assert distances[~np.eye(48, dtype=bool)].min() > 4
    for color in drawing.BUTTON_COLORS.values():
        assert np.abs(pixels - color).max(axis=-1).min() >= 60


@pytest.mark.parametrize("by", ["color", "label"])
def test_click_button_pays_for_the_named_button_only(by):
    seen = set()
    for seed in range(8):
        session = _open(BUTTON, seed, f"by={by}")
        if by == "color":
            assert session.instruction == f"Click the {session.goal} button."
        else:
            texts = {w.name: w.text for w in session.window.widgets}
            captions = [text for name, text in texts.items() if name.endswith("_plate")]
            assert len(set(captions)) == 4
            assert session.instruction == f"Click the {texts[session.goal + '_plate']} button."
        assert session.progress()["reward"] is None
        for name, box in {**session.targets, "": (0, 0, 1, 1)}.items():
            fresh = _open(BUTTON, seed, f"by={by}")
            fresh.act(_click(box))
            assert fresh.progress()["done"] is True
            assert fresh.progress()["reward"] == float(name == session.goal)
        seen.add(session.goal)
    assert len(seen) > 2


@pytest.mark.parametrize("kind", ["move", "right_click", "wait", "scroll", "drag", "navigate_back"])
def test_click_button_other_actions_change_nothing(kind):
    session = _open(BUTTON, 3)
    box = session.targets[session.goal]
    before = _pixels(session)
    session.act(Action(kind, x=box[0] + 5, y=box[1] + 5, x2=box[0], y2=box[1], seconds=0.1))
    assert session.progress()["done"] is False
    np.testing.assert_array_equal(_pixels(session), before)


def test_click_button_misses_are_forgiven_as_often_as_the_variant_says():
    session = _open(BUTTON, 4, "misses=1")
    plate = session.targets[f"{session.goal}_plate"]
    session.act(_click(plate))
    assert session.progress()["done"] is False
    session.act(_click(plate))
    assert session.progress()["done"] is True and session.progress()["reward"] == 0.0


def test_click_button_after_the_end_keeps_its_result():
    session = _open(BUTTON, 4)
    session.act(_click(session.targets[f"{session.goal}_plate"]))
    session.act(_click(session.targets[session.goal]))
    assert session.progress()["reward"] == 0.0 and session.progress()["num_clicks"] == 1


def test_scripted_click_is_in_the_middle_half_and_its_mistake_all_over_the_plate():
    rng = np.random.default_rng(3)
    session = _open(BUTTON, 7)
    x0, y0, x1, y1 = session.targets[session.goal]
    quarter_x, quarter_y = (x1 - x0) // 4, (y1 - y0) // 4
    middle = (x0 + quarter_x, y0 + quarter_y, x1 - quarter_x, y1 - quarter_y)
    plate = session.targets[f"{session.goal}_plate"]
    mistakes = [scripted_action(session, rng, 0.0) for _ in range(300)]
    assert all(_inside(scripted_action(session, rng), middle) for _ in range(300))
    assert all(_inside(action, plate) for action in mistakes)
    assert {a.y for a in mistakes} == set(range(plate[1], plate[3]))
    share = np.mean([_inside(scripted_action(session, rng, 0.25), plate) for _ in range(400)])
    assert 0.65 < share < 0.85


def test_enter_text_typing_without_focus_does_nothing():
    session = _open(TEXT, 1)
    before = _pixels(session)
    session.act(Action("type", text=session.goal))
    np.testing.assert_array_equal(_pixels(session), before)
    session.act(_click(session.targets["ok"]))
    assert session.progress() == {"submitted": True, "done": True, "reward": 0.0}


def test_enter_text_click_on_the_field_shows_focus_and_its_plate_does_not():
    session = _open(TEXT, 2)
    x0, y0, _, _ = session.targets["field"]
    session.act(_click(session.targets["field_plate"]))
    assert tuple(_pixels(session)[y0, x0]) == drawing.FIELD_BORDER_COLOR
    session.act(_click(session.targets["field"]))
    assert tuple(_pixels(session)[y0, x0]) == drawing.FOCUS_COLOR
    session.act(Action("click", x=0, y=0))
    assert tuple(_pixels(session)[y0, x0]) == drawing.FIELD_BORDER_COLOR


def test_enter_text_shows_what_was_typed():
    session = _open(TEXT, 2)
    session.act(_click(session.targets["field"]))
    before = _pixels(session)
    session.act(Action("type", text="W" * 200))  # longer than the field is wide
    x0, y0, x1, y1 = session.targets["field"]
    changed = (_pixels(session) != before).any(-1)
    assert changed[y0 + 3 : y1 - 3, x0 + 3 : x1 - 3].any()
    changed[y0 + 3 : y1 - 3, x0 + 3 : x1 - 3] = False
    assert not changed.any()


@pytest.mark.parametrize("end", ["ok", "enter", "newline"])
@pytest.mark.parametrize("right", [True, False])
def test_enter_text_submission_pays_for_the_exact_text(end, right):
    session = _open(TEXT, 9)
    text = session.goal if right else session.goal + "s"
    session.act(_click(session.targets["field"]))
    session.act(Action("type", text=text + "\n" * (end == "newline")))
    if end == "ok":
        session.act(_click(session.targets["ok"]))
    elif end == "enter":
        session.act(Action("keys", keys="enter"))
    assert session.progress() == {"submitted": True, "done": True, "reward": float(right)}


def test_enter_text_keys_edit_the_field():
    session = _open(TEXT, 3)
    session.act(_click(session.targets["field"]))
    for action, text in [
        (Action("type", text="abc"), "abc"),
        (Action("keys", keys="backspace"), "ab"),
        (Action("keys", keys="ctrl+v"), "ab"),  # nothing was copied yet
        (Action("keys", keys="ctrl+a"), "ab"),
        (Action("keys", keys="ctrl+c"), "ab"),
        (Action("type", text="x\x07"), "x"),  # replaces the selection; no key types a bell
        (Action("keys", keys="ctrl+v"), "xab"),
        (Action("keys", keys="ctrl+a"), "xab"),
        (Action("keys", keys="delete"), ""),
        (Action("type", text="y" * 100), "y" * 64),
    ]:
        session.act(action)
        assert session.window.texts["field"] == text


def test_enter_text_scripted_mistakes_miss_their_widget():
    rng = np.random.default_rng(4)
    for seed in range(40):
        session = _open(TEXT, seed)
        assert _inside(scripted_action(session, rng, 0.0), session.targets["field_plate"])
        session.act(scripted_action(session, rng))
        session.act(scripted_action(session, rng, 0.0))  # typing has no mistake of its own
        action = scripted_action(session, rng, 0.0)
        assert not _inside(action, session.targets["ok"])
        assert 0 <= action.x < session.width_px and 0 <= action.y < session.height_px


def test_enter_text_scripted_action_replaces_wrong_text():
    session = _open(TEXT, 5)
    session.act(_click(session.targets["field"]))
    session.act(Action("type", text="wrong"))
    _play(session, np.random.default_rng(0))
    assert session.progress()["reward"] == 1.0


@pytest.mark.parametrize(("name", "variant"), [(BUTTON, "popup=1"), (TEXT, "popup=1")])
def test_popup_blocks_everything_until_it_is_closed(name, variant):
    session = _open(name, 1, variant)
    x0, y0, x1, y1 = session.targets["popup"]
    assert (_pixels(session)[y0:y1, x0:x1] == drawing.DIALOG_COLOR).all(-1).any()
    goal = "field" if name == TEXT else session.goal
    session.act(_click(session.targets[goal]))
    session.act(_click(session.targets["popup_title"]))
    assert session.progress()["done"] is False and "popup" in session.targets
    assert session.window.focus is None
    session.act(_click(session.targets["popup_close"]))
    assert "popup" not in session.targets and session.progress()["done"] is False
    session.act(_click(session.targets[goal]))
    assert session.window.focus == "field" or session.progress()["reward"] == 1.0


def test_popup_escape_closes_it():
    session = _open(BUTTON, 1, "popup=1")
    session.act(Action("keys", keys="esc"))
    assert "popup" not in session.targets


@pytest.mark.parametrize("name", [BUTTON, TEXT, SHEET])
def test_shift_moves_the_layout_once_and_keeps_its_contents(name):
    session = _open(name, 2, "shift=1")
    places = [session.targets]
    for _ in range(3):
        session.act(Action("wait", seconds=0.1))
        places.append(session.targets)
    assert places[0] != places[1] and places[1] == places[2] == places[3]
    assert {k: (b[2] - b[0], b[3] - b[1]) for k, b in places[0].items()} == {
        k: (b[2] - b[0], b[3] - b[1]) for k, b in places[1].items()
    }
    unshifted = _open(name, 2)
    before = unshifted.targets
    unshifted.act(Action("wait", seconds=0.1))
    assert unshifted.targets == before


def _submit(session, values):
    for c, value in enumerate(values):
        session.act(_click(session.targets[f"field_{c}"]))
        session.act(Action("type", text=value))
    session.act(_click(session.targets["submit"]))


@pytest.mark.parametrize(
    ("submissions", "indices", "incorrect", "done", "reward"),
    [
        ("0", [0], 0, False, 1 / 4),
        ("0123", [0, 1, 2, 3], 0, True, 1.0),
        ("3210", [3, 2, 1, 0], 0, True, 1.0),
        ("0x", [0], 1, False, 0.0),
        ("xxx0", [0], 3, False, 0.0),  # three wrong and one right: not what one right pays
        ("xxxx0", [], 4, True, 0.0),
        ("00", [0, 0], 0, False, 0.0),
        ("0012", [0, 0, 1, 2], 0, False, 2 / 4),
        ("0x123", [0, 1, 2, 3], 1, True, 3 / 4),
        ("00000", [0, 0, 0, 0, 0], 0, True, 0.0),
    ],
)
def test_data_entry_counts_and_pays_by_its_rule(submissions, indices, incorrect, done, reward):
    session = _open(SHEET, 1, "rows=4")
    rows = session.judge.rows
    for which in submissions:
        values = (rows[0][0], rows[1][1]) if which == "x" else rows[int(which)]
        _submit(session, values)  # "x" mixes two rows
    assert session.progress() == {
        "submitted_row_indices": indices,
        "num_incorrect_submissions": incorrect,
        "done": done,
        "reward": reward,
    }


def test_data_entry_copies_a_cell_into_a_field():
    session = _open(SHEET, 1)
    session.act(_click(session.targets["cell_1_0"]))
    session.act(Action("type", text="not here"))  # a cell cannot be typed into
    session.act(Action("keys", keys="ctrl+c"))
    session.act(_click(session.targets["field_1"]))
    session.act(Action("keys", keys="ctrl+v"))
    assert session.window.texts == {"field_0": "", "field_1": session.judge.rows[1][0]}
    session.act(Action("keys", keys="tab"))
    assert session.window.focus == "field_0"
    assert session.screenshot().size == (448, 336)


@pytest.mark.parametrize(
    ("name", "variant", "words"),
    [
        ("desktop/click_buton", "", ["desktop/click_buton", "did you mean 'desktop/click_button'"]),
        (BUTTON, "button=5", ["'button'", "did you mean 'buttons'"]),
        (BUTTON, "rows=3", ["'rows'", "known are buttons, colors, by, misses, popup, shift"]),
        (BUTTON, "buttons=7", ["'7'", "2, 3, 4, 5, 6"]),
        (BUTTON, "buttons=3,colors=2", ["3 buttons of 2 colors"]),
        (BUTTON, "by=size", ["'size'", "color, label"]),
        (TEXT, "popup", ["'popup' is not key=value"]),
        (TEXT, "popup=1,popup=0", ["'popup' is given twice"]),
        (SHEET, "buttons=3", ["'buttons'"]),
    ],
)
def test_variant_that_is_wrong_says_what_and_names_the_nearest(name, variant, words):
    with pytest.raises(VerifierError) as caught:
        open_session(TaskSpec(name, 0, variant))
    assert all(word in str(caught.value) for word in words)


def test_variant_colors_takes_the_first_few():
    seen = {_open(BUTTON, seed, "buttons=2,colors=3").goal for seed in range(40)}
    assert seen == set(list(drawing.BUTTON_COLORS)[:3])


def test_variant_is_read_with_spaces_and_defaults():
    options = parse_variant(BUTTON, " buttons=5, by=label ,popup=1")
    assert (options.buttons, options.by, options.popup, options.shift) == (5, "label", 1, 0)
    assert parse_variant(BUTTON, "") == parse_variant(BUTTON, "buttons=4")
