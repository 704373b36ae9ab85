"""The layers of DESIGN.md hold: read from the imports of every file, run by nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "uirl_jax"

# A room may import the rooms of lower layers, and its own layer only where ALLOWED says so.
LAYERS = (
    {"errors"},
    {"types", "seeds", "platform_flags", "untrusted_json"},
    {"untrusted_http"},
    {"rl", "models", "chat", "actions", "vision_inputs", "config", "metrics", "curriculum"},
    {"engine", "shards", "checkpoints", "policy_sync", "verifiers"},
    {"actor", "learner", "evaluate"},
    {"report", "charts", "run_config"},
    {"workdir"},
    {"run"},
    {"main", "vlm"},
)
ALLOWED = {
    ("chat", "vision_inputs"),  # how many placeholders an image has
    ("chat", "actions"),  # an action format brings its prompt
    ("models", "vision_inputs"),  # a model directory says how its images are cut
    ("report", "charts"),
}
WITHOUT_JAX = (
    "types",
    "errors",
    "models/hub",
    "verifiers",
    "untrusted",
    "shards/record",
    "shards/writer",
    "shards/reader",
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
    for path in [*sources(), *(ROOT / "tools").glob("*.py"), *(ROOT / "configs").glob("*.py")]:
        if path.name == "bench_peers.py":  # what we are compared with, behind a flag and an extra
            continue
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & {"torch", "peft", "pickle"}, path


def test_configs_are_read_in_a_minute():
    for path in (ROOT / "configs").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path
