"""Python and the packages that Swift needs, with the versions that were tested."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator

from packaging.requirements import Requirement

from swift import DISTRIBUTION, __version__
from swift.tools.doctor.finding import Finding

_TOPIC = "software"


def examine_software() -> Iterator[Finding]:
    """Compares the installed packages with those that Swift's own metadata names."""
    try:
        needs = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{DISTRIBUTION} is not installed, Swift runs from its files: versions of packages are not compared"
        yield Finding(_TOPIC, "note", text)
        needs = []
    yield from judge_packages(needs, importlib.metadata.version)


def judge_packages(needs: Iterable[str], version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Judges the versions of packages.

    Args:
        needs: requirements as a package's metadata has them; those of extras are left out.
        version_of: function that returns the version of an installed package, or raises PackageNotFoundError.
    """
    found, wrong = dict[str, str](), False
    for requirement in map(Requirement, needs):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = found[requirement.name] = version_of(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            has = "is not installed" if version is None else f"is {version}"
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(_TOPIC, "missing", f"{requirement.name} {has}: {remedy}")
            wrong = True
    if not wrong:
        main = "".join(f", {name} {found[name]}" for name in ("jax", "numpy") if name in found)
        yield Finding(_TOPIC, "ok", f"Swift {__version__}, Python {platform.python_version()}{main}")
