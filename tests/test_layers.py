"""The layers of docs/architecture.md hold: read from the imports of every file, run by nothing."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "uirl_jax"

# A room may import the rooms of lower layers, and its own layer only where ALLOWED says so.
LAYERS = (
    {"errors", "log_lines"},
    {"types", "seeds", "platform_flags", "untrusted", "assets", "user_code", "console"},
    {"store"},
    {"rl", "models", "actions"},
    {"families"},
    {"engine", "shards", "checkpoints", "policy_sync", "verifiers"},
    {"demonstrations", "trackers"},
    {"metrics"},
    {"actor", "learner", "evaluation", "players"},
    {"watch", "config"},
    {"run"},
    {"roles"},
    {"main", "vlm"},
    {"__main__"},
)
# The same inside uirl_jax/verifiers: the client imports neither a task nor the server.
VERIFIERS = (
    {"wire"},
    {"dialects", "screenshots"},
    {"client", "tasks"},
    {"recorded"},
    {"own_tasks", "containers"},
    {"browser"},
    {"server"},
    {"doctor"},
)
ALLOWED = {
    ("players", "actor"),  # and no learner: an evaluation or a replay builds none
    ("players", "evaluation"),
}
WITHOUT_JAX = (
    "types",
    "errors",
    "log_lines",
    "console",
    "models/hub",
    "models/directory",
    "models/weight_table",
    "families/chat",
    "families/screens",
    "verifiers",
    "untrusted",
    "store",
    "shards/record",
    "shards/writer",
    "shards/reader",
    "shards/queue",
    "shards/journal",
)


def level(room: str) -> int:
    levels = [number for number, rooms in enumerate(LAYERS) if room in rooms]
    assert levels, f"uirl_jax/{room} has no layer in LAYERS"
    return levels[0]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {name for node in nodes for name in imported(node)}


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def test_rooms_import_only_what_lies_below_them():
    wrong = []
    for path in sources():
        room = room_of(path)
        for name in imports(path):
            parts = name.split(".")
            if parts[0] in ("tools", "configs", "tests"):
                wrong.append(f"{path.name} imports {name}")
            if parts[0] != "uirl_jax" or len(parts) < 2 or parts[1] == room:
                continue
            other = parts[1]
            if level(other) >= level(room) and (room, other) not in ALLOWED:
                wrong.append(f"{room} ({path.name}) imports {other}")
    assert not wrong, "\n".join(wrong)


def test_verifiers_import_only_what_lies_below_them():
    levels = {room: number for number, rooms in enumerate(VERIFIERS) for room in rooms}
    wrong = []
    for path in sources():
        if room_of(path) != "verifiers":
            continue
        room = path.relative_to(PACKAGE / "verifiers").parts[0].removesuffix(".py")
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] != ["uirl_jax", "verifiers"] or parts[2] == room:
                continue
            if levels[parts[2]] >= levels[room]:
                wrong.append(f"{room} ({path.name}) imports {parts[2]}")
    assert not wrong, "\n".join(wrong)


def test_verifiers_have_no_import_circle():
    """Imports inside functions count too."""
    files = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
        for path in sources()
        if room_of(path) == "verifiers"
    }
    left = {name: files.keys() & full_names(path) for name, path in files.items()}
    while leaves := [name for name, below in left.items() if not below & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def full_names(path: Path) -> set[str]:
    """The modules that a file imports, and those whose names it imports."""
    names = imports(path)
    return names | {name.rpartition(".")[0] for name in names}


def test_rooms_without_jax_import_none():
    for path in sources():
        relative = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if not relative.startswith(WITHOUT_JAX):
            continue
        heavy = {name for name in imports(path) if name.split(".")[0] in ("jax", "flax", "optax")}
        assert not heavy, f"{relative} imports {heavy}"


def test_transformers_and_the_hub_are_imported_only_where_they_are_used():
    """Inside a function: transformers takes as long to import as everything else of a start."""
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = {name.split(".")[0] for name in imported(node)}
            assert not names & {"transformers", "huggingface_hub", "httpx2"}, path


def test_product_never_imports_the_oracles():
    for path in [*sources(), *(ROOT / "tools").rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        if path == ROOT / "tools/bench/peers.py":  # what we are compared with, behind a flag
            continue
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & {"torch", "peft", "pickle"}, path


def test_configs_are_read_in_a_minute():
    for path in (ROOT / "configs").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path


def test_nothing_outside_families_and_their_table_names_a_family():
    """`uirl_jax.families.table` alone imports the folders; the rest goes through the border."""
    folders = {path.parent.name for path in PACKAGE.glob("families/*/__init__.py")}
    assert "qwen2_vl" in folders
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[:2] in {("families", name) for name in folders}:
            continue
        if path == PACKAGE / "families" / "table.py":
            continue
        named = {name for name in imports(path) for folder in folders if f".{folder}" in name}
        assert not named, f"{path.relative_to(ROOT)} imports {named}"


def test_what_a_family_does_on_the_host_imports_no_jax():
    for path in PACKAGE.glob("families/*/*.py"):
        if path.stem in ("config", "images", "inputs", "chat"):
            heavy = {name for name in imports(path) if name.split(".")[0] in ("jax", "flax")}
            assert not heavy, f"{path} imports {heavy}"


def test_the_table_of_families_is_read_without_jax():
    """A process that only plays episodes knows the family and holds no JAX (130 MiB)."""
    code = (
        "import sys; from uirl_jax.families.table import FAMILIES; "
        "sys.exit(bool({'jax', 'flax'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_top_level_has_fourteen_files_at_most():
    assert len([path for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]) <= 14


def test_functions_have_at_most_120_lines_and_ten_parameters():
    long = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            count = len([name for name in named if name and name.arg not in ("self", "cls")])
            if lines > 120 or count > 10:
                where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                long.append(f"{where}: {lines} lines, {count} parameters")
    assert not long, "\n".join(long)
