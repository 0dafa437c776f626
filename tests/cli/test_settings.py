"""A wrong setting, on the command line or in a gin file, is told in one line, and nothing is written."""

import pytest

ELEMENTWISE = (
    "is not elementwise (it applies {!r} to a whole array), and every rank updates only a slice of each expert: use an "
    "elementwise optimizer such as adamw, sgd or lion"
)

SETTINGS = {
    # names
    "Experiment.num_step=3": "Experiment.num_step = 3: Experiment has no such setting; did you mean num_steps?",
    "Experimnt.num_steps=3": "Experimnt.num_steps = 3: there is no Experimnt; did you mean Experiment?",
    "swift.Experiment.sed=3": "swift.Experiment.sed = 3: swift.Experiment has no such setting; did you mean seed?",
    "Experiment.placement=@Symmi()": "Experiment.placement = @Symmi(): there is no Symmi; did you mean Symi?",
    "num_stepz=3": "num_stepz = 3: is used nowhere; did you mean Experiment.num_steps?",
    "xyzzy=3": "xyzzy = 3: is used nowhere; a setting is named like Experiment.num_steps",
    "FlexMoE.interval=3": "FlexMoE.interval = 3: would change nothing: this experiment has no @FlexMoE()",
    "other/Experiment.seed=3": "other/Experiment.seed = 3: would change nothing: this experiment has no "
    "@other/Experiment()",
    # form
    "Experiment.num_steps": "--set = 'Experiment.num_steps': must be NAME=VALUE, such as Experiment.num_steps=100",
    "=3": "--set = '=3': must be NAME=VALUE, such as Experiment.num_steps=100",
    "Experiment..seed=3": "--set = 'Experiment..seed=3': is not gin: Malformatted scope or selector.",
    "Experiment.placement=@": "--set = 'Experiment.placement=@': is not gin: Unexpected token.",
    "Experiment.seed=%seed": "Experiment.seed = %seed: %seed is set nowhere",
    "Experiment.model=@Experiment()": "Experiment.model = @Experiment(): contains itself",
    # types
    "Experiment.num_steps=abc": "Experiment.num_steps = 'abc': must be a whole number of at least 1",
    "Experiment.num_steps=1.5": "Experiment.num_steps = 1.5: must be a whole number of at least 1",
    "Experiment.num_steps=True": "Experiment.num_steps = True: must be a whole number of at least 1",
    "Experiment.num_steps=@Static()": "Experiment.num_steps = @Static(): must be a whole number of at least 1",
    "Experiment.num_steps=": "Experiment.num_steps = '': must be a whole number of at least 1",
    "Experiment.seed=4294967296": "Experiment.seed = 4294967296: must be a whole number from 0 to 4,294,967,295",
    "Experiment.placement=@Symi": "Experiment.placement = @Symi: must be a placement policy, such as @Symi()",
    "Experiment.placement=symi": "Experiment.placement = 'symi': must be a placement policy, such as @Symi()",
    "Experiment.experts=3": "Experiment.experts = 3: must be @ExpertConfig()",
    "Experiment.model=@ExpertConfig()": "Experiment.model = @ExpertConfig(): must be @ModelConfig()",
    "Experiment.model=@model_size()": "model_size.name = (not set): has no default: it has to be set",
    "Experiment.ranks=gpu": "Experiment.ranks = 'gpu': must be one of emulated, devices, virtual",
    "Experiment.compute_dtype=int8": "Experiment.compute_dtype = 'int8': must be one of float32, bfloat16, float64",
    "Experiment.target_loss=low": "Experiment.target_loss = 'low': must be a number or None",
    "ModelConfig.moe_pattern=3": "ModelConfig.moe_pattern = 3: must be a list, each item True or False",
    "ModelConfig.moe_pattern=['no', 'no']": "ModelConfig.moe_pattern = ['no', 'no']: must be a list, each item True or "
    "False",
    "DataConfig.source=3": "DataConfig.source = 3: must be @StandardLibrary() or @TextFiles() or @TokenFile() or "
    "@YOURS() (see StreamSource) or @Pipeline() or @Mixture()",
    "DataConfig.tokenizer=@TextFiles()": "DataConfig.tokenizer = @TextFiles(): must be @ByteTokenizer() or "
    "@TokenizerFile()",
    "DataConfig.validation_share=half": "DataConfig.validation_share = 'half': must be a number",
    "DataConfig.source=@TokenFile()": "TokenFile.path = (not set): has no default: it has to be set",
    "TextFiles.pattern=3": "TextFiles.pattern = 3: must be a text",
    # values that do not go together
    "ExpertConfig.num_classes=64": "ExpertConfig.slots_per_rank = 4: at least 32, for each of 64 experts to have a "
    "slot on 2 expert ranks",
    "ExpertConfig.top_k=5": "ExpertConfig.top_k = 5: a token cannot go to more than ExpertConfig.num_classes = 4 "
    "experts",
    "Experiment.sequences_per_microbatch=1": "Experiment.sequences_per_microbatch = 1: must be at least "
    "Topology.num_expert_ranks = 2",
    "ModelConfig.model_dim=17": "ModelConfig.model_dim = 17: must be a multiple of ModelConfig.num_heads = 2",
    "ModelConfig.num_layers=3": "ModelConfig.moe_pattern = (False, True): its length must divide "
    "ModelConfig.num_layers = 3",
    "Topology.num_stages=3": "Topology.num_stages = 3: must be at most ModelConfig.num_layers = 2: every stage needs a "
    "layer",
    "Experiment.cut=(1, 1)": "Experiment.cut = (1, 1): must be Topology.num_stages = 1 numbers",
    "Experiment.cut=(3,)": "Experiment.cut = (3,): must sum to ModelConfig.num_layers = 2, not 3",
    "Experiment.cut=(0,)": "Experiment.cut = (0,): must be whole numbers of at least 1: every stage needs a layer",
    "ModelConfig.norm=batch": "ModelConfig.norm = 'batch': must be one of layernorm, rmsnorm",
    "TopK.gate_scale=0": "TopK.gate_scale = 0: must be a number above 0",
    # the optimizer
    "OptimizerConfig.name=adamv": "OptimizerConfig.name = 'adamv': optax has no such optimizer; try adamw, sgd or lion",
    "OptimizerConfig.name=3": "OptimizerConfig.name = 3: must be a text",
    "OptimizerConfig.name=lamb": f"OptimizerConfig.name = 'lamb': {ELEMENTWISE.format('reduce_sum')}",
    "OptimizerConfig.options=3": "OptimizerConfig.options = 3: must be a dictionary, such as {'b1': 0.9}",
    "OptimizerConfig.options={'learning_rate': 1}": "OptimizerConfig.options = {'learning_rate': 1}: optax.adamw has "
    "no option 'learning_rate'; its options are b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov",
    "OptimizerConfig.options={'b1': 'x'}": "OptimizerConfig.name = 'adamw': does not work with OptimizerConfig.options "
    "= {'b1': 'x'} (unsupported operand type(s) for -: 'int' and 'str')",
    "OptimizerConfig.warmup_steps=6": "OptimizerConfig.warmup_steps = 6: must be below Experiment.num_steps = 6",
    "OptimizerConfig.decayed=norms": "OptimizerConfig.decayed = 'norms': must be one of all, matrices",
    "OptimizerConfig.transformation=adamw": "OptimizerConfig.transformation = 'adamw': must be @YOURS() (see "
    "CustomOptimizer) or None",
    "OptimizerConfig.decay_steps=2": "OptimizerConfig.warmup_steps = 2: must be below OptimizerConfig.decay_steps = 2 "
    "(tiny.gin, line 13)",
    "OptimizerConfig.peak_learning_rate=fast": "OptimizerConfig.peak_learning_rate = 'fast': must be a number of at "
    "least 0",
    # the data
    "TextFiles.pattern=/nowhere/*": "TextFiles.pattern = '/nowhere/*': no file matches",
    "DataConfig.validation_share=2": "DataConfig.validation_share = 2: must be more than 0 and less than 1",
    "ModelConfig.sequence_length=100000": "ModelConfig.sequence_length = 100000: the train split holds 4611 tokens, "
    "and a window needs 100001: use a shorter sequence or more data",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting_is_told(refusal, setting):
    assert refusal("train", "tiny.gin", "--set", setting) == SETTINGS[setting]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("Experiment.placement=@FlexMoE()", "FlexMoE.interval=0"),
            "FlexMoE.interval = 0: at least 1 iteration",
        ),
        (
            ("Experiment.model=@model_size()", "model_size.name=huge"),
            "model_size.name = 'huge': choose one of demo, gpt-small, gpt-medium, gpt-large, olmoe-1b-7b, "
            "mixtral-8x7b, qwen3-30b-a3b, deepseek-moe-16b, olmoe-1b-7b-tiny, mixtral-8x7b-tiny, "
            "qwen3-30b-a3b-tiny, deepseek-moe-16b-tiny",
        ),
        (
            ("OptimizerConfig.name=adafactor", "OptimizerConfig.options={}"),
            f"OptimizerConfig.name = 'adafactor': {ELEMENTWISE.format('reduce_sum')}",
        ),
        (
            ("Experiment.ranks=devices", "Topology.num_expert_ranks=16", "Experiment.sequences_per_microbatch=16"),
            "Topology.num_expert_ranks = 16: 1 worker(s) with that many ranks need 16 devices and there are 12; "
            "use fewer, or ranks 'emulated' or 'virtual'",
        ),
        (
            ("DataConfig.source=@TokenFile()", "TokenFile.path=/nowhere"),
            "TokenFile.path = '/nowhere': cannot be read: No such file or directory",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_told(refusal, settings, line):
    assert refusal("train", "tiny.gin", *(word for setting in settings for word in ("--set", setting))) == line


def test_an_empty_corpus_is_told(refusal, here):
    (here / "empty.txt").touch()
    expected = "TextFiles.pattern = '*.txt': all files that match (1) are empty"
    assert refusal("train", "tiny.gin", "--set", "TextFiles.pattern=*.txt") == expected


def test_a_corpus_that_is_not_text_is_told(refusal, here):
    for name in "abcdefgh":
        (here / f"{name}.bin").write_bytes(b"text, and then \xff\xfe")
    line = refusal("train", "tiny.gin", "--set", "TextFiles.pattern=*.bin")
    assert line.startswith("TextFiles.pattern = '*.bin': ")
    assert line.endswith("is not UTF-8 text (byte 15)")


FILES = {
    "include 'tiny.gin'\n\nExperiment.num_step = 3\n": "Experiment.num_step = 3: Experiment has no such setting; did "
    "you mean num_steps? (wrong.gin, line 3)",
    "include 'tiny.gin'\nExperiment:\n  sead = 3\n": "Experiment.sead = 3: Experiment has no such setting; did you "
    "mean seed? (wrong.gin, line 3)",
    "include 'tiny.gin'\nExperiment.placement = @Symmi()\n": "Experiment.placement = @Symmi(): there is no Symmi; did "
    "you mean Symi? (wrong.gin, line 2)",
    "num_steps = 3\n": "num_steps = 3: is used nowhere; did you mean Experiment.num_steps? (wrong.gin, line 1)",
    "\nExperiment.seed = = 3\n": "CONFIG = 'wrong.gin': line 2 is not gin: Unable to parse value.",
    "include 'tiny.gin'\n\nThis is prose.\n": "CONFIG = 'wrong.gin': line 3 is not gin: Couldn't parse statement, "
    "expected ':' or '='.",
    "Experiment.ranks = devices\n": "CONFIG = 'wrong.gin': line 1 is not gin: devices is not a value; text goes in "
    "quotation marks",
    "include 'nothere.gin'\n": "CONFIG = 'wrong.gin includes nothere.gin': cannot be read: No such file or directory",
    "include 'wrong.gin'\n": "CONFIG = 'wrong.gin includes wrong.gin': a file cannot include itself",
    "import no_such_module\n": "CONFIG = 'wrong.gin': line 1 cannot be followed: No module named 'no_such_module'",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_is_told(refusal, here, text):
    (here / "wrong.gin").write_text(text)
    assert refusal("train", "wrong.gin") == FILES[text]


@pytest.mark.parametrize("text", ["Experiment.seed = (1,\n", "Experiment.ranks = 'virtual\n"])
def test_an_open_bracket_or_text_is_told(refusal, here, text):
    (here / "wrong.gin").write_text(text)
    assert "is not gin: " in refusal("train", "wrong.gin")  # the rest are the words of Python's tokenizer


def test_a_mistake_in_an_included_file_names_that_file(refusal, here):
    (here / "inner.gin").write_text("\n\nExperiment.sead = 3\n")
    (here / "outer.gin").write_text("include 'inner.gin'\n")
    assert refusal("train", "outer.gin").endswith("did you mean seed? (inner.gin, line 3)")


def test_a_file_that_cannot_be_read_is_told(refusal, here):
    (here / "binary.gin").write_bytes(b"\xff\xfe")
    assert refusal("train", "nothere.gin") == "CONFIG = 'nothere.gin': cannot be read: No such file or directory"
    assert refusal("train", "corpus") == "CONFIG = 'corpus': cannot be read: Is a directory"
    assert refusal("train", "binary.gin") == "CONFIG = 'binary.gin': is not UTF-8 text (byte 0)"
