"""What can rot in the documentation: links, paths, modules, and the size of pages.

Reads Markdown and sources as text; runs no command of the documentation.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = [path for path in PAGES if path.parent == ROOT / "docs"]
MAX_WORDS, MAX_COLUMNS = 900, 100

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^()\s]+)\)")
_SPAN = re.compile(r"`([^`]+)`")
_PATH = re.compile(
    r"(?<![\w/.-])((?:configs|docs|examples|launch|tests|tools|uirl_jax)/[\w/.-]*[\w/])"
)
_OF_THE_READER = {"launch/env"}  # a copy of launch/env.example, which git ignores
_NO_NAMES = {"", "click", "docs", "here", "how", "link", "page", "this"}


_CONFLICT = re.compile(r"^(<{7}|>{7})( |$)|^={7}$", re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_fences(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def prose(path: Path) -> str:
    """A page without its code blocks."""
    lines = without_fences(path).splitlines()
    return "\n".join(line for line in lines if not line.startswith("    "))


def commands(path: Path) -> str:
    """Its indented blocks, with continued lines joined, and its code spans."""
    text = without_fences(path)
    blocks = [line for line in text.splitlines() if line.startswith("    ")]
    spans = [span.replace("\n", " ") for span in _SPAN.findall(prose(path))]
    return "\n".join(blocks).replace("\\\n", " ") + "\n" + "\n".join(spans)


def anchors(path: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", without_fences(path), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in words}


def links(path: Path) -> Iterator[tuple[str, str]]:
    """(text, target) of every link and image."""
    for text, target in _LINK.findall(prose(path)):
        yield " ".join(text.split()), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_merge_was_left_half_done(page):
    assert _CONFLICT.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve_and_name_their_target(page):
    wrong = []
    for text, target in links(page):
        if text.lower() in _NO_NAMES:
            wrong.append(f"[{text}]({target}) does not name its target")
        if re.match(r"https?://", target):
            continue
        relative, _, fragment = target.partition("#")
        found = (page.parent / relative).resolve() if relative else page
        if not found.exists():
            wrong.append(f"{target}: no such file")
        elif fragment and fragment not in anchors(found):
            wrong.append(f"{target}: no such heading in {name_of(found)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_a_page_names_exist(page):
    text = commands(page)
    missing = {name for name in _PATH.findall(text) if not (ROOT / name).exists()}
    missing -= _OF_THE_READER
    assert not missing, f"{name_of(page)} names {sorted(missing)}"


def test_pages_that_sources_name_exist():
    wrong = []
    for folder in ("configs", "examples", "launch", "tools", "uirl_jax"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in (".py", ".sh", ".md", ".j2"):
                continue
            names = re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
            wrong += [f"{name_of(path)}: {name}" for name in names if not (ROOT / name).exists()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_that_a_page_runs_or_imports_exist(page):
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"\bpython -m +([a-z_][\w.]*\w)", text))
    wrong = [module for module in modules if not is_runnable(module)]
    for package, name in re.findall(r"\bfrom (uirl_jax[\w.]*) import (\w+)", text):
        module = importlib.import_module(package)
        if not hasattr(module, name) and importlib.util.find_spec(f"{package}.{name}") is None:
            wrong.append(f"from {package} import {name}")
    assert not wrong, f"{name_of(page)}: {wrong}"


def is_runnable(module: str) -> bool:
    """Whether `python -m module` finds something to run."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    return spec is not None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_wrap(page):
    long = [
        line
        for line in prose(page).splitlines()
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|") and "](" not in line
    ]
    assert not long, f"{name_of(page)}: {long}"


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=name_of)
def test_page_is_short(page):
    words = [word for word in prose(page).split() if re.search(r"\w", word)]
    assert len(words) < MAX_WORDS, f"{name_of(page)} has {len(words)} words"


def test_index_names_every_guide():
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)}
    missing = {path for path in GUIDES if path != index} - named
    assert not missing, sorted(name_of(path) for path in missing)


def test_a_broken_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, with `code`\n\nSee [here](gone.md).\n\n```\n# no heading\n```\n\n"
        "    python -m tools.gone --config=configs/gone.py\n"
    )
    assert anchors(page) == {"a-title-with-code"}
    assert list(links(page)) == [("here", "gone.md")]
    assert _PATH.findall(commands(page)) == ["configs/gone.py"]
    assert not is_runnable("tools.gone")
    assert not is_runnable("uirl_jax.rl")  # a package without __main__
