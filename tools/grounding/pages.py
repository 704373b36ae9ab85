"""Composes a page of random components: HTML from a theme's templates and a random generator.

All words are our own, and escaped all the same. What does not fit on the screen is cut off by it.
"""

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tools.grounding.themes import Theme
from tools.grounding.words import Words

T = TypeVar("T")
_COLUMN_PX = 260  # a wider screen has more columns
_BLOCK_PX = 30  # height of a block at the smallest font, to fill the screen and little more

# Named so that `questions` finds the same name in the pixels.
FILLS = {
    "red": ("#d92626", "#c81e1e", "#ee3333"),
    "orange": ("#f08010", "#ee8a1d"),
    "yellow": ("#f5d90a", "#ffe11a"),
    "green": ("#1e9e3a", "#2eb34a", "#178a2e"),
    "blue": ("#1f5fd6", "#2a6df0", "#1a4fb8"),
    "purple": ("#7a2bc4", "#8a3ad6"),
    "black": ("#111111", "#000000"),
    "grey": ("#8a8a8a", "#9a9a9a"),
}
_ICONS = {
    **{
        "Close": "\u00d7",
        "Menu": "☰",
        "Add": "+",
        "Settings": "⚙",
        "Favourite": "★",
        "Search": "⌕",
    },
    **{"Back": "←", "Forward": "→", "Up": "↑", "Down": "↓", "Confirm": "✓", "Edit": "✎"},
    **{"Email": "✉", "Phone": "☎", "Home": "⌂", "Play": "▶", "Refresh": "↻", "Delete": "✖"},
}
_FONTS = (
    *('"Liberation Sans"', '"Liberation Serif"', '"Liberation Mono"', '"DejaVu Sans"'),
    *('"Liberation Sans"', '"DejaVu Sans Mono"'),
)
_PLAIN_CSS = """
.row {{ display: flex; flex-wrap: wrap; gap: {gap}px; margin: 0 0 {gap}px; align-items: center; }}
.field {{ margin: 0 0 {gap}px; }} .field label {{ display: {label}; margin-right: 4px; }}
button {{ font: inherit; padding: {pad}px {pad2}px; border: {border}px solid {line};
  border-radius: {radius}px; background: {soft}; color: {ink}; }}
input:not([type=checkbox]):not([type=radio]), textarea, select {{ font: inherit; width: {width}%;
  max-width: 220px; padding: {pad}px; border: 1px solid {line}; border-radius: {radius}px;
  background: {field}; color: {ink}; }}
a {{ color: {accent}; }} h2 {{ font-size: 1.3em; margin: 0 0 {gap}px; }}
h3 {{ font-size: 1.1em; margin: 0 0 {gap}px; }} p {{ margin: 0 0 {gap}px; }}
.tabs {{ display: flex; border-bottom: 2px solid {accent}; margin: 0 0 {gap}px; }}
.tab {{ border-radius: {radius}px {radius}px 0 0; }} .tab.active {{ background: {accent};
  color: white; }}
.menu {{ list-style: none; margin: 0 0 {gap}px; padding: 2px; border: 1px solid {line};
  width: max-content; background: {field}; }} .menu li {{ padding: {pad}px {pad2}px; }}
.menu li + li {{ border-top: {border}px solid {line}; }}
table {{ border-collapse: collapse; margin: 0 0 {gap}px; }} th, td {{ border: 1px solid {line};
  padding: {pad}px {pad2}px; text-align: left; }} th {{ background: {soft}; }}
.card {{ border: 1px solid {line}; border-radius: {radius}px; padding: {pad2}px;
  margin: 0 0 {gap}px; background: {field}; }}
"""
_BASE_CSS = """
html {{ font-size: {root}px !important; overflow: hidden; min-width: 0 !important; }}
body {{ margin: 0; padding: {margin}px; overflow: hidden; font-size: {root}px !important;
  {body} }}
* {{ caret-animation: manual; }}
.columns-of-page {{ display: grid; grid-template-columns: repeat({columns}, minmax(0, 1fr));
  gap: {gap}px; align-items: start; }}
.columns-of-page > div {{ min-width: 0; {cut} }}
.inline {{ display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: 6px; }}
.inline > * {{ width: auto; margin: 0; }}
{pico}
"""
_PICO_CSS = """:root { --pico-spacing: .5rem; --pico-form-element-spacing-vertical: .25rem;
  --pico-form-element-spacing-horizontal: .5rem; } nav ul { flex-wrap: wrap; }"""


@dataclasses.dataclass(frozen=True)
class Page:
    """What `browser` puts into an empty document."""

    theme: str
    attribute: tuple[str, str]  # name and value, of <html>
    style: str  # after the library's
    body: str


def compose(rng: np.random.Generator, theme: Theme, size_px: tuple[int, int]) -> Page:
    """A page; one of plain HTML gets a random style."""
    return _Composer(rng, theme, size_px).page()


class _Composer:
    """A page in the making."""

    def __init__(self, rng: np.random.Generator, theme: Theme, size_px: tuple[int, int]) -> None:
        self._rng, self._theme, self._size_px = rng, theme, size_px
        self._words = Words(rng)
        self._ids = 0
        self._small = min(size_px) < 300

    def page(self) -> Page:
        theme, (width, height) = self._theme, self._size_px
        low, high = theme.root_px
        root = round(self._rng.uniform(low, high) * (1.0 if self._small else 1.25), 1)
        columns = max(1, round(width / _COLUMN_PX * self._rng.uniform(0.7, 1.2)))
        dark = bool(theme.dark) and self._rng.random() < 0.2
        body, own = self._plain_style() if theme.name == "plain" else ("", "")
        style = _BASE_CSS.format(
            root=root,
            margin=self._integer(2, 9),
            gap=self._integer(2, 10),
            columns=columns,
            cut="overflow: clip; padding: 0 4px;" if columns > 1 else "",
            body=body,
            pico=_PICO_CSS if theme.name == "pico" else "",
        )
        count = max(3, round(height / _BLOCK_PX * 9 / root))
        blocks = ["".join(self._block() for _ in range(count)) for _ in range(columns)]
        inner = "".join(f"<div>{block}</div>" for block in blocks)
        return Page(
            theme.name,
            (theme.dark or "data-theme", "dark" if dark else "light"),
            own + style,
            f'<div class="columns-of-page">{inner}</div>',
        )

    def _plain_style(self) -> tuple[str, str]:
        """Declarations of the body, and rules for the components."""
        rng = self._rng
        dark = rng.random() < 0.15
        hue, accent = self._integer(0, 359), self._integer(0, 359)
        ground, ink, field = ("18%", "92%", "26%") if dark else ("97%", "12%", "100%")
        body = (
            f"font-family: {self._pick(_FONTS)}; background: hsl({hue} 25% {ground}); "
            f"color: hsl({hue} 20% {ink});"
        )
        css = _PLAIN_CSS.format(
            gap=self._integer(2, 9),
            pad=self._integer(1, 5),
            pad2=self._integer(3, 11),
            border=self._integer(0, 2),
            radius=self._pick((0, 0, 2, 4, 8, 14)),
            width=self._pick((50, 70, 90)),
            label=self._pick(("block", "inline-block")),
            line=f"hsl({hue} 15% {50 if dark else 62}%)",
            soft=f"hsl({hue} 12% {32 if dark else 88}%)",
            ink=f"hsl({hue} 20% {ink})",
            field=f"hsl({hue} 10% {field})",
            accent=f"hsl({accent} 65% {68 if dark else 38}%)",
        )
        return body, css

    def _block(self) -> str:
        blocks: tuple[tuple[float, Callable[[], str]], ...] = (
            (3.0, self._buttons),
            (3.0, self._field),
            (1.5, self._choices),
            (1.5, self._tabs),
            (1.2, self._menu),
            (1.2, self._nav),
            (1.3, self._table),
            (1.0, self._paragraph),
            (1.0, self._icons),
            (1.0, self._shapes),
            (0.7, self._card),
            (0.7, lambda: self._fill("heading", text=self._words.name())),
        )
        weights = np.array([weight for weight, _ in blocks])
        return blocks[int(self._rng.choice(len(blocks), p=weights / weights.sum()))][1]()

    def _buttons(self) -> str:
        items = "".join(self._button() for _ in range(self._integer(1, 3)))
        return self._fill("buttons", items=items)

    def _button(self) -> str:
        style = ""
        if self._theme.name == "plain" and self._rng.random() < 0.5:
            name = self._pick(tuple(FILLS))
            ink = "black" if name in ("yellow", "orange") else "white"
            style = f"background:{self._pick(FILLS[name])};color:{ink}"
        return self._fill("button", text=self._words.action(), style=style)

    def _field(self) -> str:
        self._ids += 1
        label = self._words.name()
        kind = self._pick(("input",) * 5 + ("select",) * 3 + ("textarea", "range"))
        if kind == "select":
            options = "".join(f"<option>{self._words.name()}</option>" for _ in range(3))
            control = self._fill(kind, options=options)
        else:
            filled = self._rng.random() < 0.3
            control = self._fill(
                kind,
                type=self._pick(("text", "text", "email", "password", "search")),
                value=self._words.value() if filled else "",
                hint=f"Enter {label.lower()}" if self._rng.random() < 0.3 else "",
                number=str(self._integer(5, 95)),
            )
        return self._fill("field", label=label, control=control)

    def _choices(self) -> str:
        kind, group = self._pick(("checkbox", "radio")), f"group{self._ids}"
        parts = []
        chosen = self._integer(0, 2)
        switch = self._rng.random() < 0.3
        for number in range(self._integer(2, 4)):
            self._ids += 1
            checked = number == chosen if kind == "radio" else self._rng.random() < 0.4
            parts.append(
                self._fill(
                    kind,
                    text=self._words.name(),
                    group=group,
                    checked=" checked" if checked else "",
                    switch="form-switch" if switch else "",
                    role=' role="switch"' if switch else "",
                )
            )
        return f"<div>{''.join(parts)}</div>"

    def _tabs(self) -> str:
        count = self._integer(2, 3 if self._small else 5)
        active = self._integer(0, count - 1)
        items = "".join(
            self._fill(
                "tab",
                text=self._words.name().split()[-1].capitalize(),
                active=" active" if number == active else "",
                active_outline="" if number == active else "outline",
                is_active="is-active" if number == active else "",
            )
            for number in range(count)
        )
        return self._fill("tabs", items=items)

    def _menu(self) -> str:
        items = "".join(
            self._fill("menuitem", text=self._words.name()) for _ in range(self._integer(2, 5))
        )
        return self._fill("menu", items=items)

    def _nav(self) -> str:
        count = self._integer(2, 3 if self._small else 5)
        items = "".join(self._fill("navlink", text=self._words.name()) for _ in range(count))
        return self._fill("nav", items=items)

    def _table(self) -> str:
        columns, rows = self._integer(2, 2 if self._small else 4), self._integer(2, 4)
        heads = "".join(f"<th>{self._words.name().split()[-1]}</th>" for _ in range(columns))
        body = "".join(
            "<tr>" + "".join(f"<td>{self._words.value()}</td>" for _ in range(columns)) + "</tr>"
            for _ in range(rows)
        )
        return self._fill("table", heads=heads, rows=body)

    def _paragraph(self) -> str:
        words = self._words.latin(self._integer(6, 16))
        for _ in range(self._integer(1, 2)):
            link = self._fill("link", text=self._words.name().lower())
            words[self._integer(0, len(words) - 1)] = link
        return self._fill("paragraph", body=" ".join(words))

    def _icons(self) -> str:
        names = self._rng.permutation(np.array(list(_ICONS)))[: self._integer(2, 4)]
        items = "".join(self._fill("icon", text=str(n), icon=_ICONS[str(n)]) for n in names)
        return self._fill("buttons", items=items)

    def _shapes(self) -> str:
        """An SVG with shapes side by side, of different colours or forms."""
        count, side = self._integer(2, 4), self._integer(12, 26)
        parts = []
        for number in range(count):
            fill = self._pick(FILLS[self._pick(tuple(FILLS))])
            x, y = 2 + number * (side + 8), 2
            middle = f'cx="{x + side / 2}" cy="{y + side / 2}"'
            parts.append(
                self._pick(
                    (
                        f'<circle {middle} r="{side / 2}" fill="{fill}"/>',
                        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}"/>',
                        f'<polygon points="{x},{y + side} {x + side / 2},{y} {x + side},{y + side}"'
                        f' fill="{fill}"/>',
                    )
                )
            )
        width = count * (side + 8)
        return (
            f'<svg width="{width}" height="{side + 4}" style="display:block;margin:0 0 4px">'
            f"{''.join(parts)}</svg>"
        )

    def _card(self) -> str:
        body = self._fill("paragraph", body=" ".join(self._words.latin(5))) + self._buttons()
        return self._fill("card", title=self._words.name(), body=body)

    def _fill(self, template: str, **fields: str) -> str:
        """A template with its fields: texts escaped, HTML of other templates as it is."""
        for name in ("text", "label", "title", "value", "hint"):
            if name in fields:
                fields[name] = html.escape(fields[name])
        looks = {
            "v": self._pick(self._theme.variants),
            "id": f"field{self._ids}",
            "size": self._pick(("", "btn-sm", "is-small")),
            "control_size": self._pick(("", "form-control-sm form-select-sm")),
            "tabs_look": self._pick(("tabs", "pills")),
            "tabs_box": self._pick(("", "is-boxed", "is-toggle")),
            "table_look": self._pick(("", "is-bordered", "is-striped")),
            "more": self._pick(("", "table-striped", "table-bordered")),
            "style": "",
        }
        return self._theme.templates[template].format(**{**looks, **fields})

    def _integer(self, low: int, high: int) -> int:
        """Of low to high, both among them."""
        return int(self._rng.integers(low, high + 1))

    def _pick(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]
