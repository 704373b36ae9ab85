"""Style sheets of component libraries from the npm registry: pinned, checked, kept in a cache.

`npm pack` downloads a package's archive, so a mirror or proxy of the user's own .npmrc is used. The
archive must have the sha512 below, name the licence below and hold its text. Nothing of it is run.
"""

import base64
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from uirl_jax.errors import UirlError
from uirl_jax.store.files import write_atomically

_DOWNLOAD_S = 120.0
_MAX_FILE_BYTES = 4 * 2**20


class LibraryError(UirlError):
    """A library that cannot be downloaded, or is not the one that is pinned."""


@dataclasses.dataclass(frozen=True)
class Library:
    """One archive of the registry, and the style sheet in it."""

    name: str  # of its theme
    package: str
    version: str
    sha512: str  # base64, as the registry's `integrity` has it
    css: str
    licence_file: str
    licence: str = "MIT"

    @property
    def archive(self) -> str:
        return f"{self.package.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


# Looked up with `npm view PACKAGE version license dist.integrity` on 2026-11-25.
LIBRARIES = (
    Library(
        "bootstrap",
        "bootstrap",
        "5.3.8",
        "HP1SZDqaLDPwsNiqRqi5NcP0SSXciX2s9E+RyqJIIqGo+vJeN5AJVM98CXmW/Wux0nQ5L7jeWUdplCEf0Ee+tg==",
        "package/dist/css/bootstrap.min.css",
        "package/LICENSE",
    ),
    Library(
        "pico",
        "@picocss/pico",
        "2.1.1",
        "kIDugA7Ps4U+2BHxiNHmvgPIQDWPDU4IeU6TNRdvXQM1uZX+FibqDQT2xUOnnO2yq/LUHcwnGlu1hvf4KfXnMg==",
        "package/css/pico.min.css",
        "package/LICENSE.md",
    ),
    Library(
        "bulma",
        "bulma",
        "1.0.4",
        "Ffb6YGXDiZYX3cqvSbHWqQ8+LkX6tVoTcZuVB3lm93sbAVXlO0D6QlOTMnV6g18gILpAXqkG2z9hf9z4hCjz2g==",
        "package/css/bulma.min.css",
        "package/LICENSE",
    ),
)


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/uirl_jax/components, or below ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "uirl_jax" / "components"


def read_css(library: Library, cache: Path) -> str:
    """The library's style sheet, of the archive in the cache, which is downloaded once.

    Raises: LibraryError: no npm, no network, or an archive that is not the pinned one.
    """
    path = cache / library.archive
    data = path.read_bytes() if path.is_file() else _download(library)
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != library.sha512:
        raise LibraryError(
            f"{library.archive}: its sha512 is {found[:16]}..., expected {library.sha512[:16]}...; "
            f"delete {path} if it is there"
        )
    css = _checked(library, data)
    if not path.is_file():
        write_atomically(path, data)
    return css


def _download(library: Library) -> bytes:
    npm = shutil.which("npm")
    name = f"{library.package}@{library.version}"
    if npm is None:
        raise LibraryError(f"{name}: there is no npm to download it with")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", name, "--ignore-scripts", "--silent"]
        try:
            subprocess.run(
                command, cwd=folder, capture_output=True, check=True, timeout=_DOWNLOAD_S
            )
            return (Path(folder) / library.archive).read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            reason = type(error).__name__
            if isinstance(error, subprocess.CalledProcessError):
                lines = error.stderr.decode(errors="replace").strip().splitlines()
                reason = lines[0] if lines else f"exit code {error.returncode}"
            raise LibraryError(f"{name}: npm pack: {ascii(reason)[1:160]}") from None


def _checked(library: Library, archive: bytes) -> str:
    """The style sheet of an archive whose sha512 is right. Raises LibraryError: another licence."""
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz") as tar:

            def read(name: str) -> str:
                member = tar.extractfile(name)
                assert member is not None
                return member.read(_MAX_FILE_BYTES).decode("utf-8")

            licence = json.loads(read("package/package.json")).get("license")
            if licence != library.licence or "Permission is hereby granted" not in read(
                library.licence_file
            ):
                raise LibraryError(
                    f"{library.archive}: its licence is {licence!r}, expected {library.licence}"
                )
            return read(library.css)
