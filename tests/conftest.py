"""Twelve emulated devices for all tests, no silent broadcasts, and a walk over the jaxprs of programs.

A walk over the jaxpr of a program that says where devices could wait for each other for ever.

Every value has the mesh axes over which it may differ. In a branch or a loop whose predicate differs over some axis,
not all devices arrive. There ``ppermute`` waits for those that do not, whatever axis it moves along. Another collective
waits only for its own members: it is found where the predicate differs over its axis, unless it has groups: those are
for the programmer to keep together.
"""

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import install_import_hook

from tests.case_tiers import LONG_TESTS, QUICK_TESTS
from tests.compiling import compile_quickly, compiled_as_in_a_run

ROOT = Path(__file__).parents[1]
CHECKED = (
    "experts",
    "mesh",
    "pipeline",
    "checkpoint/units",
    "checkpoint/selection",
    "checkpoint/snapshots",
    "checkpoint/peer_snapshots",
    "checkpoint/recovery",
)
"""Packages and modules whose annotated shapes and dtypes are checked at every call, under pytest only.

The rest of `checkpoint` has no annotated arrays, and a checked settings class would take any name.
"""

gc.disable()  # until all tests are there: to look through what stays takes a quarter of the time to import it
# Whatever the environment says, modules are compiled once for all tests and for the processes that they start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The hook acts on modules as they are imported, so all of them are imported here, before any test imports them.
array_check = import_module("tests.array_check")
with (
    mock.patch("jaxtyping.jaxtyped", array_check.checked_where_arrays_are),
    install_import_hook(
        [f"swift.{package.replace('/', '.')}" for package in CHECKED], "tests.array_check.check_arrays"
    ),
):
    for path in (
        path
        for package in CHECKED
        for path in [ROOT / "swift" / f"{package}.py", *sorted((ROOT / "swift" / package).rglob("[a-z]*.py"))]
        if path.exists()
    ):
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    from swift.data.config import DataConfig
    from swift.data.sources import TextFiles
    from swift.jaxprs import scan_counts
    from swift.mesh.devices import emulate_devices

emulate_devices(12)
# An example takes long on a loaded machine, or where it is the first to compile: no test asserts a time.
hypothesis.settings.register_profile("swift", deadline=None)
hypothesis.settings.load_profile("swift")
# Many tests compile the same small programs, some in another process.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Has the quick and the long tests, and the processes that they start, compile quickly rather than well.

    Most of what they take is to compile. Not for programs that have to agree to the bit: these are compiled as those of
    a run are (``compiled_well``), and so are all where slow tests run, too.
    """
    if config.option.markexpr in (QUICK_TESTS, LONG_TESTS):
        compile_quickly()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spares the garbage collector what all tests need: an eighth of their time would be to look at it again."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.fixture(scope="module")
def x64():
    """Double precision for the tests of a module."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compiled_well():
    """Compiles as a run does, for programs that have to agree to the bit."""
    with compiled_as_in_a_run():
        yield


@pytest.fixture
def no_cache():
    """Turns JAX's own cache off, which cannot read programs for devices that are only described."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few documents of words that repeat, so that there is something to learn."""
    directory, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["swift", "expert", "slot", "rank", "token", "router", "stage", "bubble"]
    for index in range(20):
        (directory / f"{index}.txt").write_text(" ".join(random.choice(words, 300)))
    return DataConfig(TextFiles(str(directory / "*.txt")), validation_share=0.3)


@pytest.fixture
def strict_types():
    """No silent change of type; optax and Flax do not keep to it, so only code of ours alone is held to it."""
    with jax.numpy_dtype_promotion("strict"):
        yield


Axes = frozenset[str]

SAME: Axes = frozenset()
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
EVENING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
"""Collectives after which all members have the same."""
MOVING = {"ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter", "pgather"}
"""Collectives after which every member has something else."""


class Walk:
    """One walk: the axes over which values differ, and what was found on the way.

    Attributes:
        axis: what is looked for.
        found: sentences on collectives, by equation.
        branches: sentences on branches and loops whose predicate differs over the axis, by equation.
    """

    def __init__(self, axis: str):
        self.axis, self.found, self.branches = axis, dict[int, str](), dict[int, str]()

    def branch(self, equation: JaxprEqn, predicate: Axes) -> None:
        """Notes a branch or a loop."""
        if self.axis in predicate:
            self.branches[id(equation)] = f"{equation.primitive.name} where {sorted(predicate)} differ: {equation}"[
                :400
            ]

    def jaxpr(self, jaxpr: Jaxpr, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """The axes over which the outputs differ, given those of the inputs, where not all along ``inside`` arrive."""
        open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        differ = dict(zip(open_jaxpr.invars, inputs, strict=True)) | dict.fromkeys(open_jaxpr.constvars, SAME)
        of = lambda v: SAME if isinstance(v, Literal) else differ[v]  # noqa: E731
        for equation in open_jaxpr.eqns:
            outputs = self.equation(equation, [of(v) for v in equation.invars], inside)
            differ.update(zip(equation.outvars, outputs, strict=True))
        return [of(v) for v in open_jaxpr.outvars]

    def equation(self, equation: JaxprEqn, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """The same for one equation."""
        name, params, together = equation.primitive.name, equation.params, SAME.union(*inputs)
        rules: dict[str, Callable[..., list[Axes]]] = {
            "cond": self.cond,
            "while": self.loop,
            "scan": self.scan,
            "shard_map": self.shard_map,
        }
        if name in rules:
            return rules[name](equation, inputs, inside)
        if name in CALLS:
            return self.jaxpr(params.get("jaxpr") or params["call_jaxpr"], inputs, inside)
        if name == "axis_index":
            together = names(params["axis_name"])
        elif name in EVENING | MOVING:
            axes, groups = names(params.get("axes", params.get("axis_name"))), params.get("axis_index_groups")
            waits = inside if name == "ppermute" else inside & axes if groups is None else SAME
            if waits and self.axis in (axes if name == "ppermute" else waits):
                # A loop is walked until nothing changes: the last words on an equation count.
                sentence = f"{name} over {sorted(axes)} where {sorted(inside)} differ: {equation}"
                self.found[id(equation)] = sentence[:400]
            together = together - axes if name in EVENING and groups is None else together | axes
        elif name != "pallas_call":  # a kernel of one device
            assert not has_control_flow(equation), f"no rule for {name}, which has jaxprs inside"
        return [together] * len(equation.outvars)

    def cond(self, equation: JaxprEqn, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """Outputs of a branch differ also where the branches that are taken do."""
        self.branch(equation, inputs[0])
        branches = [self.jaxpr(branch, inputs[1:], inside | inputs[0]) for branch in equation.params["branches"]]
        return [inputs[0].union(*outputs) for outputs in zip(*branches, strict=True)]

    def loop(self, equation: JaxprEqn, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """Follows what is carried until nothing changes any more; the condition determines the number of rounds."""
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        for_cond, for_body, carry = inputs[:first], inputs[first:second], inputs[second:]
        before, rounds = None, SAME
        while carry != before:
            before = carry
            (rounds,) = self.jaxpr(params["cond_jaxpr"], for_cond + carry, inside)
            after = self.jaxpr(params["body_jaxpr"], for_body + carry, inside | rounds)
            carry = [rounds.union(*pair) for pair in zip(carry, after, strict=True)]
        self.jaxpr(params["cond_jaxpr"], for_cond + carry, inside | rounds)
        self.branch(equation, rounds)
        return carry

    def scan(self, equation: JaxprEqn, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """Follows what is carried until nothing changes any more; then takes the outputs of a round."""
        num_consts, num_carry = scan_counts(equation.params)
        consts, carry, xs = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts:]
        xs, before, outputs = xs[num_carry:], None, list[Axes]()
        while carry != before:
            before = carry
            outputs = self.jaxpr(equation.params["jaxpr"], consts + carry + xs, inside)
            carry = [a | b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        return carry + outputs[num_carry:]

    def shard_map(self, equation: JaxprEqn, inputs: list[Axes], inside: Axes) -> list[Axes]:
        """Inputs differ over the axes that they are split along; what comes out is one array for all devices."""
        assert not inside | SAME.union(*inputs), "a shard_map inside another"
        split = [SAME.union(*map(names, spec)) for spec in equation.params["in_specs"]]
        self.jaxpr(equation.params["jaxpr"], split, inside)
        return [SAME] * len(equation.outvars)


def names(entry: str | tuple[str, ...] | None) -> Axes:
    """The mesh axes that an entry of a PartitionSpec or a parameter of a collective names."""
    return frozenset([entry] if isinstance(entry, str) else entry or ())


def has_control_flow(equation: JaxprEqn) -> bool:
    """Whether jaxprs among the parameters hold more than the arithmetic that, for example, a scatter applies."""
    values = [leaf for value in equation.params.values() for leaf in (value if isinstance(value, tuple) else (value,))]
    inner = [getattr(value, "jaxpr", value) for value in values]
    equations = [inner_equation for jaxpr in inner if isinstance(jaxpr, Jaxpr) for inner_equation in jaxpr.eqns]
    known = CALLS | EVENING | MOVING | {"cond", "while", "scan", "shard_map", "axis_index"}
    return any(one.primitive.name in known or has_control_flow(one) for one in equations)


def ppermutes_in_varying_branches(jaxpr: Jaxpr, axis: str = "worker") -> list[str]:
    """Finds ppermutes of a program along ``axis`` that not all devices reach, and other collectives over it.

    Args:
        jaxpr: of the whole program, as ``jax.make_jaxpr`` gives it, with one shard_map or more.
        axis: of the mesh.

    Returns:
        A sentence for each, in the order of the program; none in a program that cannot wait for ever.
    """
    return list(walked(jaxpr, axis).found.values())


def varying_branches(jaxpr: Jaxpr, axis: str) -> list[str]:
    """Finds branches of a program, and numbers of rounds of loops, that differ along ``axis``; as above."""
    return list(walked(jaxpr, axis).branches.values())


def walked(jaxpr: Jaxpr, axis: str) -> Walk:
    """The walk over a whole program."""
    walk = Walk(axis)
    open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    walk.jaxpr(open_jaxpr, [SAME] * len(open_jaxpr.invars), SAME)
    return walk


@pytest.fixture(scope="session", name="ppermutes_in_varying_branches")
def _ppermutes_in_varying_branches() -> Callable[..., list[str]]:
    return ppermutes_in_varying_branches


@pytest.fixture(scope="session", name="varying_branches")
def _varying_branches() -> Callable[[Jaxpr, str], list[str]]:
    return varying_branches


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory for sockets: its name is short enough, which that of ``tmp_path`` is not."""
    with TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def listening_at() -> Callable[[int], set[str]]:
    """Tells the IPv4 addresses at which a process listens, by its id."""

    def find(pid: int) -> set[str]:
        descriptors, addresses = list(Path(f"/proc/{pid}/fd").iterdir()), set()
        inodes = {os.readlink(path) for path in descriptors if path.is_symlink()}
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                addresses.add(socket.inet_ntoa(bytes.fromhex(address.partition(":")[0])[::-1]))
        return addresses

    return find
