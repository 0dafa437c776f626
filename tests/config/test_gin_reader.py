"""Gin files and overrides make the experiment that they describe, and a mistake names its file and line."""

from dataclasses import replace

import gin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.config.bindings import Macro, Reference, parse_override, read_file
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment, load_pipelines
from swift.config.stored import config_text
from swift.data.sources import TextFiles
from swift.errors import SettingError
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.symi import Symi
from swift.models.config import ModelConfig, model_size

DEMO = Experiment()


@pytest.fixture
def load(tmp_path):
    """Loads the experiment of a text, with overrides."""

    def load_text(text, *overrides):
        (tmp_path / "one.gin").write_text(text)
        return load_experiment(tmp_path / "one.gin", overrides)

    return load_text


@pytest.mark.parametrize("setting", ["OptimizerConfig.clip_norm", "optimizer.clip_norm"])
@pytest.mark.parametrize("text", ["", "Experiment.optimizer = @OptimizerConfig()\n"])
def test_a_setting_needs_no_name_of_its_group(load, text, setting):
    assert load(text, f"{setting}=2.5") == replace(DEMO, optimizer=replace(DEMO.optimizer, clip_norm=2.5))


@pytest.mark.parametrize("setting", ["ModelConfig.num_layers", "model.num_layers"])
def test_a_setting_changes_a_preset(load, setting):
    text = "Experiment.model = @model_size()\nmodel_size.name = 'gpt-small'\n"
    assert load(text, f"{setting}=2").model == replace(model_size("gpt-small"), num_layers=2)
    assert load(text, "model.name=gpt-medium", f"{setting}=2").model == replace(model_size("gpt-medium"), num_layers=2)


def test_a_file_changes_a_default_too(load):
    """Not to that of the class, but within the setting that it is the default of."""
    assert load("Topology.num_stages = 2").topology == replace(DEMO.topology, num_stages=2)
    text = "Experiment.topology = @Topology()\nTopology.num_stages = 2\nExpertConfig.slots_per_rank = 8"
    assert load(text).topology.num_expert_ranks == 1


def test_a_path_names_one_object_of_two(load):
    text = "DataConfig.source = @TextFiles()\nDataConfig.validation_source = @TextFiles()\nTextFiles.pattern = 'a'\n"
    data = load(text, "data.validation_source.pattern=b").data
    assert (data.source, data.validation_source) == (TextFiles("a"), TextFiles("b"))


def test_a_path_goes_through_a_list(load):
    text = (
        "DataConfig.source = @Mixture()\nMixture.sources = (@a/Pipeline(), @b/Pipeline())\nMixture.weights = (1, 2)\n"
    )
    text += "Pipeline.source = @Documents()\nDocuments.source = @TextFiles()\nTextFiles.pattern = '*.txt'\n"
    sources = load(text, "b/TextFiles.pattern=b").data.source.sources
    assert [pipeline.source.source.pattern for pipeline in sources] == ["*.txt", "b"]


def test_a_path_may_follow_an_override_that_makes_its_object(load):
    assert load("", "placement=@FlexMoE()", "placement.interval=7").placement == FlexMoE(interval=7)


def test_a_macro_with_the_name_of_a_setting_is_overridden_as_one(load):
    text = "seed = 3\nExperiment.num_steps = %seed\n"
    assert (load(text, "seed=5").num_steps, load(text, "seed=5").seed) == (5, DEMO.seed)
    assert load("", "seed=5").seed == 5


def test_scopes_replace_one_another_and_are_inherited(load):
    text = "DataConfig.source = @a/b/TextFiles()\nTextFiles.pattern = 'all'\na/TextFiles.pattern = 'a'\n"
    assert load(text).data.source == TextFiles("a")
    assert load(f"{text}a/b/TextFiles.pattern = 'b'\n").data.source == TextFiles("b")
    with pytest.raises(SettingError, match=r"b/TextFiles.pattern = 'b': would change nothing.*one\.gin, line 4\)"):
        load(f"{text}b/TextFiles.pattern = 'b'\n")


def test_a_file_is_data_and_its_imports_are_not(load, tmp_path, monkeypatch):
    """Plain classes and functions of a module can be named; those that it only imports cannot."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_a.py").write_text(
        "from dataclasses import dataclass\nfrom swift.experts.placement.symi import Symi\n"
        "from swift.models.config import ModelConfig as Imported\n\n"
        "@dataclass(frozen=True)\nclass Mine(Symi):\n    share: float = 0.5\n\n\ndef tiny(num_layers=1):\n"
        "    return Imported(num_layers, 8, 2, 16, sequence_length=8)\n"
    )
    (tmp_path / "mine_b.py").write_text("from mine_a import Mine as Base\n\n\nclass Mine(Base):\n    pass\n")
    one = load("import mine_a\nExperiment.placement = @Mine()\nMine.share = 0.25\nExperiment.model = @tiny()\n",
               "tiny.num_layers=2", "model.ffn_dim=24")  # fmt: skip
    assert (type(one.placement).__name__, one.placement.share) == ("Mine", 0.25)
    assert one.model == ModelConfig(2, 8, 2, 24, sequence_length=8)
    with pytest.raises(SettingError, match="there is no Imported"):
        load("import mine_a\nExperiment.model = @Imported()\n")
    both = "import mine_a\nimport mine_b\n"
    with pytest.raises(SettingError, match=r"there is no Mine; did you mean mine_[ab].Mine\?"):
        load(f"{both}Experiment.placement = @Mine()\n")
    placement = load(f"{both}Experiment.placement = @mine_b.Mine()\nmine_b.Mine.share = 1.0\n").placement
    assert (type(placement).__module__, placement.share) == ("mine_b", 1.0)


def test_names_of_swift_stay_its_own(load, tmp_path, monkeypatch):
    """A module of the user's own may have a class with such a name, even that of the experiment."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "clash.py").write_text(
        "from dataclasses import dataclass\nfrom swift.experts.placement.symi import Symi as Base\n\n"
        "@dataclass(frozen=True)\nclass Symi(Base):\n    share: float = 0.5\n\n\nclass Experiment:\n    pass\n"
    )
    assert load("import clash\nExperiment.placement = @Symi()\n") == DEMO
    placement = load("import clash\nExperiment.placement = @clash.Symi()\nclash.Symi.share = 0.25\n").placement
    assert placement.share == 0.25


def test_a_package_passes_on_its_own_classes_and_no_others(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pkg_a").mkdir()
    (tmp_path / "pkg_a" / "__init__.py").write_text("from os import system\nfrom pkg_a.inner import Mine\n")
    (tmp_path / "pkg_a" / "inner.py").write_text(
        "from swift.experts.placement.symi import Symi\n\n\nclass Mine(Symi):\n    pass\n"
    )
    assert type(load("import pkg_a\nExperiment.placement = @Mine()\n").placement).__name__ == "Mine"
    with pytest.raises(SettingError, match="there is no system"):
        load("import pkg_a\nExperiment.seed = @system()\n")


def test_a_class_with_arguments_that_are_no_attributes(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "initial.py").write_text(
        "from dataclasses import InitVar, dataclass\nfrom swift.experts.placement.symi import Symi\n\n"
        "@dataclass(frozen=True)\nclass Initial(Symi):\n    a: InitVar[int]\n    b: int = 2\n\n\n"
        "def preset():\n    return Initial(1)\n"
    )
    text = "import initial\nExperiment.placement = @preset()\n"
    assert load(text).placement.b == 2
    with pytest.raises(SettingError, match=r"making @Initial\(\) raises TypeError: .*'a'"):
        load(text, "placement.b=3")


def test_a_macro_of_a_setting_that_was_replaced_may_stay(load):
    text = "STEPS = 30\nExperiment.num_steps = %STEPS\n"
    assert load(text).num_steps == 30
    assert load(text, "num_steps=3").num_steps == load(text, "Experiment.num_steps=3").num_steps == 3
    assert load(f"{text}Experiment.num_steps = 5\n").num_steps == 5


def test_the_settings_of_a_source_that_was_replaced_may_stay(load):
    text = "DataConfig.source = @web/TextFiles()\nweb/TextFiles.pattern = 'a'\n"
    assert load(text, "data.source=@TextFiles()", "data.source.pattern=b").data.source == TextFiles("b")
    assert load(text, "data.source=@StandardLibrary()") == DEMO


def test_a_preset_is_not_changed_by_settings_that_stand_before_it(load):
    """They belong to the model of a file that was included, which the preset replaces."""
    base = "Experiment.model = @ModelConfig()\nModelConfig.num_layers = 2\nModelConfig.model_dim = 16\n"
    base += "ModelConfig.num_heads = 2\nModelConfig.ffn_dim = 32\n"
    preset = f"{base}Experiment.model = @model_size()\nmodel_size.name = 'gpt-small'\n"
    assert load(preset).model == model_size("gpt-small")
    assert load(f"{preset}ModelConfig.num_layers = 4\n").model == replace(model_size("gpt-small"), num_layers=4)
    assert load(preset, "ModelConfig.num_layers=4").model == replace(model_size("gpt-small"), num_layers=4)


def test_an_override_that_another_one_replaces_is_refused(load):
    with pytest.raises(SettingError, match=r"= 2: would change nothing: optimizer\.clip_norm is set, which is more"):
        load("", "optimizer.clip_norm=1", "OptimizerConfig.clip_norm=2")
    text = "Experiment.placement = @x/FlexMoE()\nx/FlexMoE.interval = 10\n"
    with pytest.raises(SettingError, match=r"= 7: would change nothing: x/FlexMoE\.interval is set, which is more"):
        load(text, "FlexMoE.interval=7")


def test_a_path_may_begin_with_the_experiment(load):
    assert load("", "Experiment.optimizer.clip_norm=2").optimizer.clip_norm == 2


def test_what_is_not_set_is_located_where_its_object_is_named(load, tmp_path):
    with pytest.raises(SettingError) as error:
        load("\nDataConfig.source = @TextFiles()\n")
    place = f"({tmp_path / 'one.gin'}, line 2)"
    assert str(error.value) == f"TextFiles.pattern = (not set): has no default: it has to be set {place}"


WRONG = {
    # names
    "Experiment.num_step = 3": "Experiment.num_step = 3: Experiment has no such setting; did you mean num_steps?",
    "Experimnt.num_steps = 3": "Experimnt.num_steps = 3: there is no Experimnt; did you mean Experiment?",
    "Experiment.placement = @Symmi()": "Experiment.placement = @Symmi(): there is no Symmi; did you mean Symi?",
    "Experiment.placement = [@Symmi()]": "Experiment.placement = [@Symmi()]: there is no Symmi; did you mean Symi?",
    "Symi.interval = 3": "Symi.interval = 3: Symi has no such setting; there are none",
    "STEPS = 3": "STEPS = 3: is used nowhere; did you mean Experiment.num_steps?",
    "Experiment.num_steps = %STEPS": "Experiment.num_steps = %STEPS: %STEPS is set nowhere",
    "A = %B\nB = %A\nExperiment.seed = %A": "B = %A: contains itself",
    "Experiment.data = @Experiment()": "Experiment.data = @Experiment(): contains itself",
    "other/Experiment.seed = 3": "other/Experiment.seed = 3: would change nothing: this experiment has no "
    "@other/Experiment()",
    # values of one setting
    "Experiment.num_steps = 'abc'": "Experiment.num_steps = 'abc': must be a whole number of at least 1",
    "Experiment.seed = -1": "Experiment.seed = -1: must be a whole number from 0 to 4,294,967,295",
    "Experiment.ranks = 'gpu'": "Experiment.ranks = 'gpu': must be one of emulated, devices, virtual",
    "Experiment.experts = 3": "Experiment.experts = 3: must be @ExpertConfig()",
    "Experiment.placement = @Symi": "Experiment.placement = @Symi: must be a placement policy, such as @Symi()",
    "Experiment.target_loss = 'low'": "Experiment.target_loss = 'low': must be a number or None",
    "Experiment.window = 0": "Experiment.window = 0: must be a whole number of at least 1",
    "ModelConfig.model_dim = 0": "ModelConfig.model_dim = 0: must be a whole number of at least 1",
    "ModelConfig.norm = 'batch'": "ModelConfig.norm = 'batch': must be one of layernorm, rmsnorm",
    "ModelConfig.tied_embeddings = 1": "ModelConfig.tied_embeddings = 1: must be True or False",
    "ExpertConfig.top_k = 'two'": "ExpertConfig.top_k = 'two': must be a whole number of at least 1",
    "OptimizerConfig.name = 3": "OptimizerConfig.name = 3: must be a text",
    "OptimizerConfig.clip_norm = 0": "OptimizerConfig.clip_norm = 0: must be a number above 0",
    "CheckpointConfig.selection = 'best'": "CheckpointConfig.selection = 'best': must be one of sequential, load_aware",
    "DataConfig.validation_share = 2": "DataConfig.validation_share = 2: must be more than 0 and less than 1",
    "Topology.num_stages = 1.5": "Topology.num_stages = 1.5: must be a whole number of at least 1",
    # settings that exclude each other
    "Topology.num_stages = 9": "Topology.num_stages = 9: must be at most ModelConfig.num_layers = 4: every stage needs "
    "a layer",
    "Experiment.cut = (1, 1)": "Experiment.cut = (1, 1): must be Topology.num_stages = 1 numbers",
    "Experiment.window = 2": "Experiment.window = 2: must be 1 with a single worker",
    "Experiment.adapt = 'auto'": "Experiment.adapt = 'auto': needs several pipelines: with one, nobody has what a "
    "worker loses",
    "Experiment.failures = ('step 5: fail 3:0',)": "Experiment.failures = 'step 5: fail 3:0': no such worker among 1 "
    "pipelines x 1 stages, both counted from 0",
    "OptimizerConfig.warmup_steps = 300": "OptimizerConfig.warmup_steps = 300: must be below "
    "Experiment.num_steps = 300",
    "CheckpointConfig.plt_budget = 0.5": "CheckpointConfig.plt_budget = 0.5: would change nothing: it needs a number "
    "as CheckpointConfig.experts_per_layer",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_costs_a_line_with_its_file_and_line(load, tmp_path, setting):
    (tmp_path / "base.gin").write_text(f"\n# a comment\n{setting}\n")
    with pytest.raises(SettingError) as error:
        load("include 'base.gin'\n")
    line = 2 + len(setting.splitlines()) - ("%B" in setting)  # the macro that closes the circle
    assert str(error.value) == f"{WRONG[setting]} ({tmp_path / 'base.gin'}, line {line})"


def test_an_override_that_is_wrong_is_not_said_to_be_in_a_file(load):
    with pytest.raises(SettingError) as error:
        load("Experiment.num_steps = 5\n", "num_steps=0")
    assert str(error.value) == "Experiment.num_steps = 0: must be a whole number of at least 1"


MIXTURE = "DataConfig.source=@Mixture() Mixture.weights=[1.0]"
CLASSES = {
    "DataConfig.source=@TextFiles": "DataConfig.source = @TextFiles",
    "DataConfig.source=@TextFiles TextFiles.pattern=x": "DataConfig.source = @TextFiles",
    "DataConfig.source=@Pipeline": "DataConfig.source = @Pipeline",
    "DataConfig.source=@Pipeline() Pipeline.source=@JsonLines": "Pipeline.source = @JsonLines",
    f"{MIXTURE} Mixture.sources=[@TextFiles]": "Mixture.sources = [@TextFiles]",
    f"{MIXTURE} Mixture.sources=@TextFiles": "Mixture.sources = @TextFiles",
    "DataConfig.validation_source=@TextFiles": "DataConfig.validation_source = @TextFiles",
    "DataConfig.tokenizer=@ByteTokenizer": "DataConfig.tokenizer = @ByteTokenizer",
    "Experiment.model=@model_size": "Experiment.model = @model_size",
    "Experiment.topology=@Topology": "Experiment.topology = @Topology",
    "Experiment.placement=@FlexMoE FlexMoE.interval=3": "Experiment.placement = @FlexMoE",
    "ExpertConfig.capacity=@SlotCapacity": "ExpertConfig.capacity = @SlotCapacity",
    "ExpertConfig.router=@TopK": "ExpertConfig.router = @TopK",
    "OptimizerConfig.schedule=@Topology": "OptimizerConfig.schedule = @Topology",
    "OptimizerConfig.transformation=@Topology": "OptimizerConfig.transformation = @Topology",
}
"""References without ``()`` where an object is expected; with a setting of the class too."""


@pytest.mark.parametrize("overrides", CLASSES)
def test_a_class_is_none_of_its_objects(load, overrides):
    with pytest.raises(SettingError) as error:
        load("", *overrides.split())
    assert str(error.value).startswith(f"{CLASSES[overrides]}: must be ")
    assert "\n" not in str(error.value)


PATHS = {
    "optimiser.clip_norm=1": "there is no optimiser; did you mean optimizer?",
    "optimizer.clip_nrm=1": "OptimizerConfig has no such setting; did you mean clip_norm?",
    "data.validation_source.pattern=x": "would change nothing: data.validation_source has no settings of its own",
    "optimizer.clip.norm=1": "OptimizerConfig has no such setting; did you mean clip_norm?",
    "model.num_layer=3": "ModelConfig has no such setting; did you mean num_layers?",
    "num_steps.x=3": "would change nothing: num_steps has no settings of its own",
    "nums_steps=3": "is used nowhere; did you mean Experiment.num_steps?",
}


@pytest.mark.parametrize("override", PATHS)
def test_a_path_that_leads_nowhere_is_refused(load, override):
    name, _, _ = override.partition("=")
    with pytest.raises(SettingError) as error:
        load("", override)
    assert error.value.setting == name
    assert error.value.allowed.startswith(PATHS[override])


def test_the_settings_of_an_alternative_may_stay(load):
    text = "FlexMoE.interval = 3\nweb/TextFiles.pattern = 'x'\nDataConfig.source = @web/StandardLibrary()\n"
    assert load(text).placement == Symi()
    with pytest.raises(SettingError, match="would change nothing"):
        load(text, "FlexMoE.interval=4")


def test_a_file_of_a_pipeline_alone(tmp_path):
    (tmp_path / "one.gin").write_text("Pipeline.source = @JsonLines()\nJsonLines.pattern = '*.jsonl'\n")
    (pipeline,) = load_pipelines(tmp_path / "one.gin", ["source.pattern=other"])
    assert pipeline.source.pattern == "other"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=VALUES)
def test_any_value_is_read_as_gin_reads_it(value):
    """gin itself is the oracle, which evaluates the whole text."""
    binding = parse_override(f"x = {value!r}")
    assert binding.value == value
    assert repr(binding.value) == repr(gin.config.parse_value(repr(value)))


def test_references_and_macros_are_read_at_any_depth():
    value = parse_override("x=[@a/b/C(), {'k': (%M, @mine.D)}]").value
    assert value == [Reference("C", "a/b", True), {"k": (Macro("M"), Reference("mine.D", "", False))}]
    assert repr(value) == "[@a/b/C(), {'k': (%M, @mine.D)}]"


def test_a_later_binding_replaces_an_earlier_one_where_its_file_is_included(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.gin").write_text("A.x = 2\nA.y = 2\n")
    (tmp_path / "a.gin").write_text("A.x = 1\ninclude 'sub/b.gin'\nA:\n  y = 3\n")
    bindings = read_file(tmp_path / "a.gin", lambda path: path)
    assert {name: binding.value for name, binding in bindings.by_setting.items()} == {"A.x": 2, "A.y": 3}
    assert [binding.line for binding in bindings.by_setting.values()] == [1, 4]


@pytest.mark.parametrize("statement", ["from mine import x", "import mine as other"])
def test_only_whole_modules_are_imported(load, statement):
    with pytest.raises(SettingError, match="line 1 must be `import MODULE`"):
        load(f"{statement}\n")


def test_the_text_of_an_experiment_is_read_back(load):
    sources = ("data.source=@TextFiles()", "data.validation_source=@TextFiles()")
    one = load("", "placement=@FlexMoE()", "model.num_layers=2", *sources, "data.source.pattern=a",
               "data.validation_source.pattern=b")  # fmt: skip
    assert load(config_text(one)) == one
