"""Files beside a run or a model are data: whatever is written there, nothing of it is run."""

import json
import shutil
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.checkpoint.manifest import checkpoint_path, read_manifest, write_manifest
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment, load_stored
from swift.config.stored import OF_RUN, OF_TRAINING, UnreadableConfig, build, config_text, read_config, write_config
from swift.data.config import DataConfig, Mixture
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.errors import SettingError
from tests.data.operators import LongerThan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
HOSTILE = {
    "import": "import hostile\n",
    "call": "import hostile\nExperiment.seed = @hostile.harm()\n",
    "include": "include 'hostile.gin'\n",
    "macro": "import hostile\nharm = @hostile.harm()\nExperiment.seed = %harm\n",
    "expression": "Experiment.seed = __import__('hostile').harm()\n",
    "nested": "Experiment.target_loss = [@hostile.harm()]\n",
    "other class": "Experiment.placement = @harm()\n",
    "scope": "import hostile\nscope/Experiment.seed = @hostile.harm()\n",
}
HARM = """
from pathlib import Path
Path(__file__).with_name("harmed").touch()
def harm():
    return 1
"""


@pytest.fixture
def is_harmed(here, monkeypatch):
    """Makes what hostile files are after; whether it has been run."""
    (here / "hostile.py").write_text(HARM)
    (here / "hostile.gin").write_text("import hostile\n")
    monkeypatch.syspath_prepend(here)
    return (here / "harmed").exists


def write_hostile(directory, kind, attack, text):
    """The configuration of a run or a model with an attack in it."""
    if kind == "gin":
        (directory / "config.json").unlink(missing_ok=True)
        (directory / "config.gin").write_text(text + HOSTILE[attack])
    else:
        (directory / "config.json").write_text(JSON[attack])


def in_json(**settings):
    return json.dumps({"version": 1, "experiment": {"class": "Experiment", "settings": settings}})


JSON = {
    "module": in_json(placement={"class": "harm", "module": "hostile", "settings": {}}),
    "class": in_json(placement={"class": "harm", "settings": {}}),
    "function": in_json(model={"class": "model_size", "settings": {"name": "demo"}}),
    "another's": json.dumps({"version": 1, "experiment": {"class": "Experiment", "module": "hostile", "settings": {}}}),
    "reference": in_json(seed="@hostile.harm()"),
    "gin": "import hostile\n",
    "setting": in_json(harm=1),
    "type": in_json(num_steps="many"),
    "wrong part": in_json(topology={"class": "Symi", "settings": {}}),
    "object": in_json(model={"py/object": "hostile.harm"}),
    "unreadable": in_json(placement={"unreadable": "<harm>"}),
    "list": "[]",
    "depth": "[" * 100_000,
    "version": json.dumps({"version": 2}),
    "long": " " * 2**21,
}
ATTACKS = [("gin", name) for name in HOSTILE] + [("json", name) for name in JSON]


@pytest.mark.parametrize(("kind", "attack"), ATTACKS)
def test_a_hostile_model_or_run_is_refused_in_a_line_and_runs_nothing(tell, half, here, kind, attack, is_harmed):
    model = here / "model"
    model.mkdir()
    text = (half / "config.gin").read_text()
    (model / "config.gin").write_text(text)
    write_hostile(model, kind, attack, text)
    write_hostile(half, kind, attack, text)
    commands = ["generate model", "export half --out exported"]
    # A run that continues has its configuration from the command line, and is held against the text beside it.
    commands += ["train tiny.gin --run-dir half --resume"] * (kind == "gin")
    for command in commands:
        told = tell(*command.split())
        assert (told.code, told.err.count("\n"), told.new) == (2, 1, []), told
        assert "Traceback" not in told.err
    assert not is_harmed()


def test_the_page_of_a_hostile_run_shows_its_text_and_runs_nothing(tell, half, is_harmed):
    write_hostile(half, "gin", "call", "<script>alert(1)</script>\n")
    write_hostile(half, "json", "module", "")
    assert tell("report", "half").code == 0
    assert "&lt;script&gt;alert(1)" in (half / "report.html").read_text()
    assert "<script>alert" not in (half / "report.html").read_text()
    assert not is_harmed()


@pytest.mark.parametrize("attack", ["import", "call", "include", "macro"])
def test_a_file_that_the_user_names_is_a_program(here, attack, is_harmed, monkeypatch):
    """So the attacks above are real ones."""
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    (here / "named.gin").write_text(HOSTILE[attack])
    with suppress(SettingError):
        load_experiment(here / "named.gin")
    assert is_harmed()


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("*.gin")), ids=lambda path: path.stem)
def test_an_experiment_is_read_back(path, tmp_path):
    experiment = load_experiment(path)
    write_config(tmp_path, experiment)
    assert load_stored(tmp_path, "RUN_DIR", None) == experiment


@dataclass(frozen=True)
class Box:
    content: object = None


@dataclass(frozen=True)
class Experimental:
    """Stands in for an experiment."""

    value: object = None


Experimental.__name__ = "Experiment"
Experimental.__module__ = "swift.tests"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.builds(Box, inner)
    ),
)


@given(plain)
def test_any_plain_value_is_read_as_it_was_written(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("any")
    write_config(path, Experimental(value))
    found = build(read_config(path), lambda part: {"Experiment": Experimental, "Box": Box}.get(part.kind))
    assert repr(found) == repr(Experimental(value))


@given(st.text() | st.text(alphabet="Experiment.@%() ='\"[]{}\n\\import", min_size=1))
def test_no_text_at_all_gets_further_than_a_line(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any")
    (path / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with suppress(SettingError):
        load_stored(path, "RUN_DIR", None)


OWN = """
from dataclasses import dataclass
from swift.experts.placement import Symi


@dataclass(frozen=True)
class MODULE(Symi):
    share: float = 0.5
"""


@pytest.fixture
def own(here, monkeypatch):
    """A run with a policy of the user's own, in its directory ``run``; returns its experiment."""
    module = f"own_policy_{abs(hash(str(here)))}"
    (here / f"{module}.py").write_text(OWN.replace("MODULE", module))
    (here / "mine.gin").write_text(
        f"import {module}\ninclude 'tiny.gin'\nExperiment.placement = @{module}()\n{module}.share = 0.25\n"
    )
    monkeypatch.syspath_prepend(here)
    experiment = load_experiment(here / "mine.gin")
    (here / "run").mkdir()
    (here / "run/config.gin").write_text(config_text(experiment))
    write_config(here / "run", experiment)
    return experiment


def test_a_class_of_the_users_own_is_found_in_the_configuration_that_they_name(own, here):
    run = here / "run"
    mine = type(own.placement).__name__  # its module is called the same
    with pytest.raises(SettingError) as refused:
        load_stored(run, "RUN_DIR", None)
    told = f"needs {mine}.{mine}, which is not Swift's own: name a gin file whose experiment has it with --config FILE"
    assert str(refused.value) == f"RUN_DIR = '{run}': {told}"
    # The classes are the file's, the settings the run's.
    (here / "changed.gin").write_text(f"include 'mine.gin'\n{mine}.share = 0.75\nExperiment.num_steps = 60\n")
    assert load_stored(run, "RUN_DIR", here / "changed.gin") == own
    with pytest.raises(SettingError, match=r"--config = .*: its experiment has no @.*\(\), and .*/run needs"):
        load_stored(run, "RUN_DIR", here / "tiny.gin")


def test_text_is_written_by_a_model_whose_policy_nobody_has_any_more(own, here):
    spared = load_stored(here / "run", "MODEL", None, optional_settings=["Experiment.placement"])
    assert spared == replace(own, placement=Experiment().placement)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_one_with_a_policy_of_the_users_own(own, half, here, tell, refusal):
    """The run's checkpoints are those of another, which says to have had that policy."""
    shutil.copytree(half / "checkpoints", here / "run/checkpoints")
    for step in (2, 4):
        path = checkpoint_path(here / "run/checkpoints", step)
        manifest = read_manifest(path, "checkpoint")
        write_manifest(path, replace(manifest, identity={**manifest.identity, **own.identity()}))
    fork = ("--init-from", "run", "--run-dir", "fork")
    assert refusal("train", "tiny.gin", *fork).endswith("whose experiment has it with --init-config FILE")
    line = refusal("train", "tiny.gin", *fork, "--init-config", "tiny.gin")
    assert line.startswith("--init-config = 'tiny.gin': its experiment has no @")
    line = refusal("train", "mine.gin", *fork, "--set", "ModelConfig.ffn_dim=16")  # which has the policy, too
    assert line.startswith("--init-from = 'run': is of another model: its ModelConfig is ")
    line = refusal("train", "tiny.gin", "--init-config", "mine.gin")
    assert line == "--init-config = 'mine.gin': goes with --init-from, which is not set"

    told = tell("train", "tiny.gin", *fork, "--init-config", "mine.gin", "--stop-at", "1")
    assert told.code == 0, told.err
    assert "begins with the weights of run, iteration 4" in told.err


def rewrite(run, change):
    """Changes the settings in ``config.json`` of a run or a model."""
    said = json.loads((run / "config.json").read_text())
    change(said["experiment"]["settings"])
    (run / "config.json").write_text(json.dumps(said))


GONE = {"class": "Gone", "module": "gone", "settings": {"years": 3}}
IN_MEMORY = {"unreadable": "InMemory(40 documents, digest 0123456789abcdef)"}
FILTERED = {
    "class": "Pipeline",
    "settings": {
        "source": {"class": "TextFiles", "settings": {"pattern": "*.txt"}},
        "operators": {
            "tuple": [
                {"class": "Filter", "settings": {"keep": GONE}},
                {"class": "Map", "settings": {"function": {"unreadable": "<function <lambda>>"}}},
            ]
        },
    },
}


def test_a_model_is_made_and_used_without_the_classes_that_only_training_needs(tell, half):
    """The run is made to have had data in memory, and operators, a planner and a schedule of the user's own."""

    def had(settings):
        settings["planner"] = GONE
        settings["data"]["settings"] |= {"source": FILTERED, "validation_source": IN_MEMORY}
        settings["optimizer"]["settings"] |= {"schedule": GONE, "warmup_steps": 1000}

    def had_besides(settings):
        settings["placement"] = GONE
        settings["optimizer"]["settings"]["transformation"] = GONE

    rewrite(half, had)
    told = tell("export", "half", "--out", "model")
    assert told.code == 0, told.err
    model = half.parent / "model"
    assert (model / "config.json").read_bytes() == (half / "config.json").read_bytes()
    rewrite(model, had_besides)
    told = tell("generate", "model", "--tokens", "2")
    assert told.code == 0, told.err


def test_a_pipeline_is_spared_with_all_that_is_in_it(tmp_path):
    """An operator of the user's own, one that exists in Python alone, and a pipeline within a mixture."""
    texts = Pipeline(Rows(({"text": "to be"}, {"text": "or not"})))
    own = texts.filter(LongerThan(3))
    for source in (own, texts.map(lambda sample: sample), Mixture((own, texts), (0.5, 0.5))):
        is_alone = isinstance(source, Pipeline)
        more = {"domain": "by", "validation_source": texts} if is_alone else {}
        write_config(tmp_path, Experiment(data=DataConfig(source, locality=0.5, validation_share=0.1, **more)))
        assert load_stored(tmp_path, "RUN_DIR", None, optional_settings=OF_RUN).data == DataConfig(validation_share=0.1)
        with pytest.raises(SettingError, match=r"LongerThan|was not written"):
            load_stored(tmp_path, "RUN_DIR", None)


def test_no_setting_of_a_users_own_class_is_forgotten():
    def own_settings(kind):
        for name, hint in typing.get_type_hints(kind).items():
            hints = {hint, *typing.get_args(hint)}
            if any(getattr(one, "_is_protocol", False) for one in hints):
                yield f"{kind.__name__}.{name}"
            for one in filter(is_dataclass, hints):
                yield from own_settings(one)

    # Those that a model needs to be read are not spared: its block and tokenizer. A pipeline is spared as a whole.
    needed = {"ModelConfig.block", "DataConfig.tokenizer", "Pipeline.source"}
    assert {*own_settings(Experiment)} == {*OF_TRAINING, *needed}


def test_what_cannot_be_written_is_told_where_it_is_read(tmp_path):
    write_config(tmp_path, Experimental(value=range(3)))
    with pytest.raises(
        UnreadableConfig, match=r"has a value that was not written, range\(0, 3\): only dataclasses and plain"
    ):
        read_config(tmp_path)
