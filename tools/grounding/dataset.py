"""The files of a folder of grounding data: shards, a manifest and a contact sheet.

    settings.json        what the stream is a function of
    screens-000000.tfrecord   questions of 100 screens as demonstrations of one turn
    screens-000000.jsonl      the same as lines of the manifest
    layout-000000.jsonl       what stands where on each of them, a line for a screen
    manifest.jsonl, contact_sheet.png, pointing/task.py   at the end

A question is a record of its own, with the screen's picture in it: a record has one instruction.
The cold start writes it again in the words of the model that learns (`recorded_demonstrations`), so
the tokens are those of a small model that ships with the package.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tools.grounding.questions import Question
from tools.grounding.screens import Element, Screen, Word
from tools.grounding.sources import Plan
from uirl_jax import assets
from uirl_jax.demonstrations.recording import Recording
from uirl_jax.errors import ConfigError, ShardError
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.writer import write_shard
from uirl_jax.store.files import write_atomically
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory
from uirl_jax.untrusted import json as untrusted_json

SCREENS_PER_SHARD = 100
SETTINGS, MANIFEST, SHEET = "settings.json", "manifest.jsonl", "contact_sheet.png"
TASK = "grounding"
_MODEL = "asset:tiny-ui-base"  # whose tokens the records have until they are told again
_SHEET_CELLS, _SHEET_COLUMNS, _CELL_PX = 60, 6, 320


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a stream is a function of. Another value is another stream: it needs a folder."""

    seed: int
    split: str
    size: tuple[int, int]  # of a page
    questions: int
    sources: dict[str, list[str]]  # name -> its components
    libraries: list[str]  # package@version
    renderer: str  # fingerprint of Chromium and its fonts
    density: int = 1  # pixels of the screen along each side of one of the page

    @property
    def screen_px(self) -> tuple[int, int]:
        return self.size[0] * self.density, self.size[1] * self.density


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"screens-{shard:06d}.tfrecord"


def layout_path(folder: Path, shard: int) -> Path:
    return folder / f"layout-{shard:06d}.jsonl"


class Folder:
    """The folder of `--out`. Raises ConfigError for one that has another stream in it."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings
        model_dir = assets.find(_MODEL)
        family = family_of(model_dir)
        cfg = family.read_config(model_dir)
        self._inputs, self._layout = family.make_inputs(cfg), layout_of(cfg)
        self._chat = Chat(model_dir, ChatConfig().completed("", model_dir), family.chat)
        wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
        file = path / SETTINGS
        if file.exists():
            found = {"density": 1} | _read_object(file)  # older folders do not say it
            other = [key for key in wanted if found.get(key) != wanted[key]]
            if other:
                raise ConfigError(
                    f"{file}: has other {', '.join(other)}; continue with the same flags, the same "
                    "Chromium and the same libraries, or give another --out"
                )
        else:
            write_atomically(file, json.dumps(wanted, indent=1).encode() + b"\n")

    def refuse_more_than(self, screens: int) -> None:
        """Raises ConfigError where the folder has screens beyond so many."""
        there = [
            int(path.stem.rpartition("-")[2]) for path in self._path.glob("screens-*.tfrecord")
        ]
        if not there:
            return
        last = max(row["screen"] for row in self.rows(max(there)))
        if last >= screens:
            raise ConfigError(
                f"{self._path}: has {last + 1} screens of this stream, more than --screens="
                f"{screens}; give another --out"
            )

    def rows(self, shard: int) -> list[dict[str, Any]]:
        """The manifest's lines of a shard that was written; [] where it was not."""
        if not shard_path(self._path, shard).is_file():
            return []
        return _read_lines(self._rows_path(shard))

    def write(self, shard: int, asked: Sequence[tuple[Screen, Sequence[Question]]]) -> None:
        """Writes the screens of a shard. The shard is renamed into place last: then it is whole."""
        rows, records, layouts = [], [], []
        for drawn, questions in asked:
            screen = dataclasses.replace(drawn, png=_smaller(drawn.png))
            digest = screen_digest(drawn.png)
            layouts.append(_layout_row(drawn))
            for number, question in enumerate(questions):
                records.append(self._record(screen, number, question))
                rows.append(self._row(screen, digest, number, question))
        shard_path(self._path, shard).unlink(
            missing_ok=True
        )  # one with fewer screens, of a shorter run
        write_atomically(self._rows_path(shard), _as_lines(rows))
        write_atomically(layout_path(self._path, shard), _as_lines(layouts))
        write_shard(shard_path(self._path, shard), records, base_hash="", layout=self._layout)

    def finish(self, shards: int, task_source: str) -> list[dict[str, Any]]:
        """Writes what is about all of the first so many shards; the manifest's lines."""
        rows = [row for shard in range(shards) for row in self.rows(shard)]
        write_atomically(self._path / MANIFEST, _as_lines(rows))
        write_atomically(self._path / "pointing" / "task.py", task_source.encode())
        file = io.BytesIO()
        _contact_sheet(list(self._pictures(rows))).save(file, "PNG")
        write_atomically(self._path / SHEET, file.getvalue())
        return rows

    def _rows_path(self, shard: int) -> Path:
        return self._path / f"screens-{shard:06d}.jsonl"

    def _record(self, screen: Screen, number: int, question: Question) -> Trajectory:
        plan, (left, top, right, bottom) = screen.plan, question.box
        task = TaskSpec(TASK, plan.number, plan.component, 1)
        size_px = self._settings.screen_px
        recording = Recording(task, question.instruction, size_px, self._chat, self._inputs)
        with Image.open(io.BytesIO(screen.png)) as image:  # only its size is read
            recording.see(image, screen.png)
        progress = {
            **{"done": True, "reward": 1.0, "box": list(question.box)},
            **{"kind": question.kind, "by": question.by},
        }
        middle = ((left + right - 1) // 2, (top + bottom - 1) // 2)
        recording.act(Action("click", x=middle[0], y=middle[1]), progress)
        told = recording.trajectory(progress, success=True, stop_reason=StopReason.COMPLETED)
        # Of all settings: questions of two folders in one set must not have the same id.
        name = [dataclasses.asdict(self._settings), plan.number, number]
        digest = hashlib.blake2b(json.dumps(name, sort_keys=True).encode(), digest_size=16)
        return dataclasses.replace(
            told,
            episode_id=digest.hexdigest(),
            renderer=self._settings.renderer,
        )

    def _row(self, screen: Screen, digest: str, number: int, question: Question) -> dict[str, Any]:
        return {
            "screen": screen.plan.number,
            "question": number,
            "digest": digest,
            "size": list(self._settings.screen_px),
            "component": screen.plan.component,
            "seed": screen.plan.seed,
            "instruction": question.instruction,
            "box": list(question.box),
            "kind": question.kind,
            "by": question.by,
        }

    def _pictures(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[Image.Image, list[Any]]]:
        """(screen, its rows) for the sheet: of as many components as there are, in turn."""
        of_screen: dict[int, list[dict[str, Any]]] = {}
        by_component: dict[str, list[int]] = {}
        for row in rows:
            if row["screen"] not in of_screen:
                by_component.setdefault(row["component"], []).append(row["screen"])
            of_screen.setdefault(row["screen"], []).append(row)
        turn = 0
        chosen: list[int] = []
        while len(chosen) < min(_SHEET_CELLS, len(of_screen)):
            found = [numbers[turn] for numbers in by_component.values() if turn < len(numbers)]
            chosen += found[: _SHEET_CELLS - len(chosen)]
            turn += 1
        wanted = set(chosen)
        for shard in sorted({number // SCREENS_PER_SHARD for number in wanted}):
            shown: set[int] = set()
            for record in read_shard(shard_path(self._path, shard))[1]:
                number = record.task.seed
                if number in wanted and number not in shown:
                    shown.add(number)
                    data = next(iter(record.images.values()))
                    yield Image.open(io.BytesIO(data)).convert("RGB"), of_screen[number]


def read_layouts(folder: Path) -> list[Screen]:
    """The screens of a folder that `write` made, in their order.

    Raises: ConfigError: it has none, or files that cannot be read.
    """
    shards = [
        shard
        for path in sorted(folder.glob(f"layout-{6 * '[0-9]'}.jsonl"))
        if shard_path(folder, shard := int(path.stem.rpartition("-")[2])).is_file()
    ]
    if not shards:
        raise ConfigError(
            f"{folder}: has no layout-*.jsonl; make the data with tools.make_grounding_data --out="
        )
    found = []
    for shard in shards:
        file = layout_path(folder, shard)
        try:
            pictures: dict[int, bytes] = {}
            for record in read_shard(shard_path(folder, shard))[1]:
                pictures.setdefault(record.task.seed, next(iter(record.images.values())))
            found += [_screen(row, pictures[row["screen"]]) for row in _read_lines(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file}: not as tools.make_grounding_data writes it ({error!r}); make it again"
            ) from None
        except ShardError as error:
            raise ConfigError(str(error)) from None
    return found


def _screen(row: dict[str, Any], png: bytes) -> Screen:
    """The reverse of `_layout_row`."""
    return Screen(
        Plan(row["screen"], 0, row["component"], row["seed"]),
        png,
        tuple(Element(**fields | {"box": tuple(fields["box"])}) for fields in row["elements"]),
        tuple(row["texts"]),
        tuple(Word(text, tuple((x, y) for x, y in letters)) for text, letters in row["words"]),
        tuple((left, top, right, bottom) for left, top, right, bottom in row["unread"]),
    )


def _layout_row(screen: Screen) -> dict[str, Any]:
    return {
        **{"screen": screen.plan.number, "component": screen.plan.component},
        "seed": screen.plan.seed,
        "elements": [dataclasses.asdict(element) for element in screen.elements],
        **{"texts": screen.texts, "words": screen.words, "unread": screen.unread},
    }


def _as_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def screen_digest(png: bytes) -> str:
    """Of the pixels: equal for pictures that look alike, however they were encoded."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = image.convert("RGB")
        content = repr(pixels.size).encode() + pixels.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _smaller(png: bytes) -> bytes:
    """The same pixels in fewer bytes: Chromium's encoder is the quick one."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(file, "PNG", compress_level=6)
    return file.getvalue()


def _contact_sheet(pictures: list[tuple[Image.Image, list[Any]]]) -> Image.Image:
    """Screens with the boxes of their questions; the instructions below in the same colours."""
    colours = ("#d000d0", "#e05000", "#0070e0", "#008040", "#806000", "#404040")
    cells = []
    for image, rows in pictures:
        factor = max(1, _CELL_PX // image.width) if image.width < _CELL_PX else 1
        scaled = image.resize(
            (image.width * factor, image.height * factor), Image.Resampling.NEAREST
        )
        draw = ImageDraw.Draw(scaled)
        for row, colour in zip(rows, colours * 9, strict=False):
            left, top, right, bottom = (side * factor for side in row["box"])
            draw.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=2)
        lines = 1 + len(rows)
        cell = Image.new("RGB", (max(scaled.width, _CELL_PX), scaled.height + 13 * lines), "white")
        cell.paste(scaled, (0, 0))
        draw = ImageDraw.Draw(cell)
        about = f"{rows[0]['screen']} {rows[0]['component']}"
        draw.text((2, scaled.height), about, fill="black")
        for number, (row, colour) in enumerate(zip(rows, colours * 9, strict=False), 1):
            draw.text((2, scaled.height + 13 * number), row["instruction"][:60], fill=colour)
        cells.append(cell)
    width = max(cell.width for cell in cells) + 8
    height = max(cell.height for cell in cells) + 8
    columns = max(1, min(_SHEET_COLUMNS, len(cells), 6 * (_CELL_PX + 8) // width))
    sheet = Image.new("RGB", (columns * width, -(-len(cells) // columns) * height), "#d0d0d0")
    for number, cell in enumerate(cells):
        sheet.paste(cell, (number % columns * width + 4, number // columns * height + 4))
    return sheet


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return untrusted_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; delete it and run the command again") from None
