"""Finds the two real compilers and keeps their caches apart.

The front end is the installed triton-ascend; the middle end is `bishengir-compile` of one
of two AscendNPU-IR releases. Both are unmodified binaries from PyPI. The last step of the
real chain (`hivmc`, HIVM to machine code) exists only in CANN; `bin/bishengir-compile`
keeps the HIVM module that would have gone into it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import ToolchainError

ARCH = "Ascend910B3"
RELEASES = ("1.1.0", "1.2.0")
CONTEST_RELEASE = "1.1.0"

_HERE = Path(__file__).resolve().parent
WRAPPER_DIR = _HERE / "bin"
WRAPPER = WRAPPER_DIR / "bishengir-compile"
REPOSITORY = _HERE.parent.parent


@dataclass(frozen=True)
class Release:
    """One installed bishengir release."""

    version: str
    compiler: Path

    @property
    def cache_dir(self) -> Path:
        """Triton's cache does not know which compiler it used, so each release and each
        version of the wrapper has a directory of its own."""
        tag = hashlib.sha256(WRAPPER.read_bytes()).hexdigest()[:12]
        return cache_root() / f"triton-bishengir-{self.version}-{tag}"


def cache_root() -> Path:
    """Where compiled kernels are kept; `VNPU_CACHE` overrides."""
    override = os.environ.get("VNPU_CACHE")
    return Path(override) if override else REPOSITORY / ".cache" / "virtual_npu"


def _candidates(version: str) -> list[Path]:
    found = []
    override = os.environ.get(f"BISHENGIR_{version.replace('.', '_')}")
    if override:
        found.append(Path(override))
    found.append(REPOSITORY / ".toolchain" / f"bishengir-{version}" / "ascendnpuir" / "bin" / "bishengir-compile")
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is not None and spec.origin is not None and installed_release() == version:
        found.append(Path(spec.origin).parent / "bin" / "bishengir-compile")
    return found


def installed_release() -> str | None:
    """Version of the ascendnpu-ir package in this environment, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ascendnpu-ir")
    except PackageNotFoundError:
        return None


@lru_cache
def find_release(version: str = CONTEST_RELEASE) -> Release:
    """The compiler of that release.

    Raises:
        ValueError: a release that this project does not know.
        ToolchainError: the release is not installed.
    """
    if version not in RELEASES:
        raise ValueError(f"release must be one of {', '.join(RELEASES)}, got {version!r}")
    tried = _candidates(version)
    for path in tried:
        if path.is_file():
            if not os.access(path, os.X_OK):  # the wheel drops the run bit
                path.chmod(path.stat().st_mode | stat.S_IXUSR)
            return Release(version, path)
    places = ", ".join(str(path) for path in tried) or "the ascendnpu-ir package (not installed)"
    raise ToolchainError(f"bishengir {version} is not installed: looked for {places}. `make setup` installs it.")


def available_releases() -> list[str]:
    """The releases that are installed, the contest's first."""
    found = []
    for version in RELEASES:
        try:
            find_release(version)
        except ToolchainError:
            continue
        found.append(version)
    return found


def use(release: Release) -> None:
    """Point this process's Triton at that release (environment of its compiler calls)."""
    os.environ["VNPU_BISHENGIR"] = str(release.compiler)
    os.environ["TRITON_ASCEND_ARCH"] = ARCH
    os.environ["TRITON_CACHE_DIR"] = str(release.cache_dir)
    # Source lines reach the HIVM module only when the front end keeps them.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "false"
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != str(WRAPPER_DIR):
        os.environ["PATH"] = os.pathsep.join([str(WRAPPER_DIR), *(p for p in path if p != str(WRAPPER_DIR))])


_NOISE = re.compile(
    r"hivmc|\[Triton\]|The compiled kernel cache|encounters error|Failed to run BiSheng|Command '\["
    r"|Stack dump|PLEASE submit|^\s*$"
)


def compiler_message(text: str) -> str:
    """The lines of the compiler's output that say what is wrong, each once, without the
    names of temporary files, without the absent `hivmc` and without Triton's frame."""
    lines: list[str] = []
    for line in text.splitlines():
        if _NOISE.search(line):
            continue
        line = re.sub(r'loc\("[^"]*?/?([\w.]+)":(\d+):\d+\): ', r"\1:\2: ", line).strip()
        if line not in lines:
            lines.append(line)
    return "\n".join(lines) or "the compiler gave no message:\n" + text.strip()
