"""The name of a model -> its directory on this machine; models on the Hugging Face hub are fetched.

    models/Qwen2-VL-2B-Instruct              a directory: used as it is
    hf://Qwen/Qwen2-VL-2B-Instruct@main      on the hub: downloaded where the cache lacks it
    Qwen/Qwen2-VL-2B-Instruct                neither: taken from the cache, never downloaded

Only `hf://` contacts the network. A bare owner/name cannot be told from a mistyped directory
(`runs/model`), so it is looked up in the cache alone and its error names both readings. A branch
moves and every process resolves it for itself: for a run of several processes, or one that will be
resumed, give a full commit hash. HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and
HF_HUB_DISABLE_TELEMETRY mean what they mean to huggingface_hub, which is imported only where a name
needs it. The files are data: weights in safetensors, JSON and templates; no code of a repository is
fetched or run.
"""

import contextlib
import errno
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uirl_jax import assets
from uirl_jax.errors import ModelError, ModelUnavailableError
from uirl_jax.models import weight_files
from uirl_jax.models.directory import TOKENIZER_FILES

logger = logging.getLogger(__name__)

# All that is read besides the weights.
DESCRIPTION_FILES = ("config.json", "model.safetensors.index.json", *TOKENIZER_FILES)
WEIGHT_FILES = ("*.safetensors",)
_SUBFOLDERS = ("*/*",)  # never needed; a pattern's * matches a slash, too

# pathlib makes one slash of two: Path("hf://owner/name") is hf:/owner/name.
_NAME = re.compile(
    r"(?P<scheme>hf:/{1,2})?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OWN_FOLDERS = ("models", "runs")  # where configs look for what a command made


def model_directory(name: str | Path, *, weights: bool = True) -> Path:
    """Finds, or for `hf://` downloads, the directory of a model.

    Args:
      name: a directory, `hf://owner/name[@revision]`, or `owner/name[@revision]` of the cache.
      weights: False asks for everything but the weights, a few megabytes.

    Returns:
      The directory. A path that does not exist and cannot be a hub name is returned as it is:
      whoever reads it says which file is missing.

    Raises:
      ModelError: the model is not in the cache and may not or cannot be downloaded.
      ModelUnavailableError: not in the cache, and the hub is away or busy.
    """
    path = assets.find(name)
    if path.is_dir():
        return path
    parts = _NAME.fullmatch(str(name))
    if parts is None:
        if is_hub_name(name):
            raise ModelError(f"{name}: expected hf://owner/name or hf://owner/name@revision")
        return path
    repo, revision = parts["repo"], parts["revision"] or "main"
    shown = f"hf://{repo}" + (f"@{revision}" if parts["revision"] else "")

    from huggingface_hub import constants, is_offline_mode  # takes 0.15 s

    cache = constants.HF_HUB_CACHE
    if parts["scheme"] and not is_offline_mode():
        return _downloaded(shown, repo, revision, weights)
    found = _cached(repo, revision, weights)
    if found is None and parts["scheme"]:
        raise ModelError(
            f"{shown}: HF_HUB_OFFLINE is set and the Hugging Face cache ({cache}) has no complete "
            "copy; unset it to download the model, or give the path of a model directory"
        )
    if found is None and repo.split("/")[0] in _OWN_FOLDERS:
        raise ModelError(
            f"{name}: no such directory; the first lines of the config say how to make or download "
            "it. Or give model.path another directory, or hf://owner/name to download a model"
        )
    if found is None:
        raise ModelError(
            f"{name}: not a directory, and the Hugging Face cache ({cache}) has no complete model "
            f"of that name; give the path of a model directory, or {shown} to download it"
        )
    return found


def repository_of(name: str | Path) -> tuple[str, str] | None:
    """(owner/name, revision or "") that a model's name stands for; None: a directory here."""
    parts = _NAME.fullmatch(str(name))
    if parts is None or assets.find(name).is_dir():
        return None
    return parts["repo"], parts["revision"] or ""


def is_hub_name(name: str | Path) -> bool:
    """Whether a name asks for the hub, whatever directories there are."""
    return str(name).startswith("hf:/")


def _cached(repo: str, revision: str, weights: bool) -> Path | None:
    """The snapshot of the cache if it is complete, without a request to the hub."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, local_files_only=True, **_selection(revision, weights)))
    except (OSError, ValueError):  # none, or without files that the listing of the cache has
        return None
    if not (path / "config.json").is_file():
        return None
    if weights:
        try:
            weight_files.paths_in(path)
        except ModelError:
            return None
    return path


def _downloaded(shown: str, repo: str, revision: str, weights: bool) -> Path:
    """The snapshot, brought up to date with the hub where the hub can be reached."""
    from huggingface_hub import snapshot_download

    with _model_errors(shown, repo, revision), _quiet_without_terminal():
        if not _is_listed(repo, revision):
            found = _ask(shown, repo, revision, weights)
            if found is not None:
                return found
        path = Path(snapshot_download(repo, **_selection(revision, weights=False)))
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{shown}: has no config.json; expected a model in Hugging Face's format"
            )
        if weights:
            _check_weights(shown, repo, path)
            # Of the same commit: a branch may have moved meanwhile.
            snapshot_download(repo, **_selection(path.name, weights=True))
    return path


def _is_listed(repo: str, revision: str) -> bool:
    """Whether the revision is a full commit hash whose listing is cached: it needs no question."""
    from huggingface_hub import errors, get_cached_repo_tree

    if not _COMMIT.fullmatch(revision):
        return False
    try:
        get_cached_repo_tree(repo, revision=revision)
    except errors.CachedRepoTreeNotFoundError:
        return False
    return True


def _ask(shown: str, repo: str, revision: str, weights: bool) -> Path | None:
    """Asks the hub for the revision, with a time limit.

    snapshot_download asks the same without one: it would wait without end for a hub that accepts
    connections and does not answer.

    Returns: None, or the cached snapshot where the hub is down.
    Raises: what huggingface_hub raises.
    """
    import httpx2  # huggingface_hub's HTTP client
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx2.TransportError, errors.HfHubHTTPError) as error:
        if not _is_away(error):
            raise
        found = _cached(repo, revision, weights)
        if found is None:
            raise
        logger.warning("model=%s cached=%s reason=%r", shown, found, _reason(error, repo, revision))
        return found
    return None


def _selection(revision: str, weights: bool) -> dict[str, Any]:
    """Arguments of snapshot_download: which files of which revision."""
    wanted = [*DESCRIPTION_FILES, *(WEIGHT_FILES if weights else ())]
    return {"revision": revision, "allow_patterns": wanted, "ignore_patterns": [*_SUBFOLDERS]}


def _check_weights(shown: str, repo: str, path: Path) -> None:
    """Before gigabytes are downloaded. Raises: ModelError: no weights to read, or no room."""
    from huggingface_hub import constants, get_cached_repo_tree

    files = [
        file for file in get_cached_repo_tree(repo, revision=path.name) if "/" not in file.path
    ]
    weights = [file for file in files if file.path.endswith(".safetensors")]
    if not weights:
        others = [f.path for f in files if f.path.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
        raise ModelError(
            f"{shown}: has no *.safetensors file"
            + (f" (but {others[0]}, which is never read)" if others else "")
            + "; name a model that has, or convert it and give the directory"
        )
    size_bytes = sum(file.size for file in weights if not (path / file.path).exists())
    free_bytes = shutil.disk_usage(path).free
    if size_bytes > free_bytes:
        raise ModelError(
            f"{shown}: needs {size_bytes / 1e9:.1f} GB in {constants.HF_HUB_CACHE}, which has "
            f"{free_bytes / 1e9:.1f} GB free; free some, or set HF_HUB_CACHE to another disk"
        )


def _quiet_without_terminal() -> contextlib.AbstractContextManager[object]:
    """No progress bars in a log file, unless HF_HUB_DISABLE_PROGRESS_BARS=0 asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    if sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS is False:
        return contextlib.nullcontext()
    return disable_progress_bars()


@contextlib.contextmanager
def _model_errors(shown: str, repo: str, revision: str) -> Iterator[None]:
    """Raises as a ModelError of one line what huggingface_hub raises."""
    try:
        yield
    except ModelError:
        raise
    # httpx2's errors, OSError, ValueError and its kinds, hf_xet's RuntimeError; and KeyError,
    # TypeError or AssertionError where a server answers with other JSON than the hub's.
    except Exception as error:
        kind = ModelUnavailableError if _is_away(error) else ModelError
        raise kind(f"{shown}: {_reason(error, repo, revision)}") from error


def _is_away(error: BaseException | None) -> bool:
    """Whether the hub could not be reached or is too busy, so that it may answer later."""
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _is_away(error.__cause__)
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 429
    return isinstance(error, httpx2.TransportError)


def _reason(error: BaseException, repo: str, revision: str) -> str:
    """What went wrong and what to do, on one line. No text of the server is repeated."""
    import httpx2
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    log_in = "run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__, repo, revision)
    if isinstance(error, errors.GatedRepoError):
        return f"{page} is gated: accept its terms on that page, then {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no revision {revision!r}; name a branch, a tag or a full commit hash"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
            return f"{page} does not exist or is private; check the name; if private, {log_in}"
        if status == 403:
            return f"{page} may not be read with this token (HTTP 403); {log_in} of another account"
        return (
            f"{constants.ENDPOINT} answered HTTP {status}; try again later, or copy the model here "
            "and give its directory"
        )
    if isinstance(error, httpx2.TransportError):
        return (
            f"{constants.ENDPOINT} cannot be reached or cut the connection "
            f"({type(error).__name__}); check the network, HF_ENDPOINT and the proxy, or copy the "
            "model here and give its directory"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left in {constants.HF_HUB_CACHE}; free some, or set HF_HUB_CACHE to another "
            "disk"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}"
    return (
        f"{constants.ENDPOINT} did not answer as the hub does ({type(error).__name__}); check "
        "HF_ENDPOINT and the proxy, and try again"
    )
