"""The keyboard: a page hears the same events as from Playwright's keyboard."""

import string

import pytest

from tests.chromium import REASON, open_page, pool_and_runner
from uirl_jax import actions
from uirl_jax.verifiers.browser import keyboard

PAGE = """<!DOCTYPE html><textarea id=field autofocus></textarea><script>
  let seen = [];
  const take = () => [seen, field.value, seen = [], field.value = ""].slice(0, 2);
  for (const kind of ["keydown", "keypress", "keyup", "beforeinput", "input"])
    addEventListener(kind, e => seen.push([kind, e.key, e.code, e.keyCode, e.charCode, e.location,
      e.ctrlKey, e.shiftKey, e.altKey, e.metaKey, e.repeat, e.data ?? null, e.inputType]), true);
  field.focus();</script>"""
NAMES = {
    **{"ctrl": "Control", "alt": "Alt", "shift": "Shift", "win": "Meta", "cmd": "Meta"},
    **{"enter": "Enter", "tab": "Tab", "space": "Space", "backspace": "Backspace"},
    **{"delete": "Delete", "insert": "Insert", "esc": "Escape", "home": "Home", "end": "End"},
    **{"up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight"},
    **{"pageup": "PageUp", "pagedown": "PageDown"},
    **{f"f{n}": f"F{n}" for n in range(1, 13)},
}
KEYS = sorted(actions.NAMED_KEYS | actions.CHARACTER_KEYS)
CHORDS = [
    *([key] for key in KEYS),
    *(["shift", key] for key in KEYS if key not in ("shift", "tab")),
    *(["ctrl", key] for key in "acvxyz"),
    *(["ctrl", "shift", "z"], ["shift", "ctrl", "left"], ["alt", "f"], ["cmd", "a"]),
]
TEXT = string.ascii_letters + string.digits + string.punctuation + " é你\n"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_an_action_is_there(key):
    events = keyboard.press([key])
    assert [event["type"] for event in events][-1] == "keyUp" and len(events) == 2


@pytest.mark.browser
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is one")
def test_page_hears_what_playwright_would_have_pressed():
    async_api = pytest.importorskip("playwright.async_api")
    from uirl_jax.verifiers.browser.pool import find_chromium

    async def theirs():
        heard = []
        async with async_api.async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=find_chromium())
            page = await browser.new_page()
            await page.set_content(PAGE)
            for chord in CHORDS:
                await page.keyboard.press("+".join(NAMES.get(key, key) for key in chord))
                heard.append(await page.evaluate("take()"))
                await page.evaluate("field.focus()")
            await page.keyboard.type(TEXT)
            heard.append(await page.evaluate("take()"))
            await browser.close()
        return heard

    async def ours(pool):
        heard = []
        tab = await open_page(pool, PAGE)
        for chord in CHORDS:
            await tab._press(chord)
            heard.append(await tab.evaluate("take()"))
            await tab.evaluate("field.focus()")
        await tab._type(TEXT)
        heard.append(await tab.evaluate("take()"))
        await pool.release(tab)
        return heard

    with pool_and_runner(warm=1, max_browsers=1) as (pool, runner):
        expected, heard = runner.run(theirs()), runner.run(ours(pool))
    for chord, one, other in zip([*CHORDS, TEXT], expected, heard, strict=True):
        assert other == one, chord
