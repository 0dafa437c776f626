"""``swift import`` and ``swift export --format hf`` without torch: refusals, and a run that begins with a model."""

import itertools
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from swift.cli.main import main
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.data.tokenizer import prompt_tokens
from swift.errors import SettingError
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.placement.policy import Static
from swift.experts.routers import NoisyTopK, TopK
from swift.hub.architectures import read_decoder, write_decoder
from swift.hub.companions import generation_of
from swift.hub.exporting import decoder_of
from swift.hub.importing import import_hugging_face
from swift.hub.tensors import TensorLocation, tensor_locations
from swift.models.config import ModelConfig
from swift.models.gpt import GPT

numpy_files = pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

CONFIG = {
    "model_type": "deepseek",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "eos_token_id": 0,
}
WORDS = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 20)}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<|endoftext|>"},
}


def write(path, config=CONFIG, files=2):
    """A directory of the hub with random weights, in several files."""
    path.mkdir()
    decoder = read_decoder(config, "")
    places = list(tensor_locations(decoder.family, GPT(decoder.model, decoder.vocab_size, decoder.num_experts)))
    random, weight_map = np.random.default_rng(0), {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        mine = {place.name: random.standard_normal(place.shape, np.float32) for place in places[number::files]}
        numpy_files.save_file(mine, path / name)
        weight_map |= dict.fromkeys(mine, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return path


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hub") / "theirs")


@pytest.fixture
def copy(hub, tmp_path):
    """The directory, to be spoilt."""
    return shutil.copytree(hub, tmp_path / "theirs")


@pytest.fixture(scope="module")
def imported(hub):
    assert main(["import", str(hub), "--out", str(hub.with_name("model"))]) == 0
    return hub.with_name("model")


def tensors(path):
    return {
        name: (array.dtype, array.tobytes())
        for file in path.glob("*.safetensors")
        for name, array in numpy_files.load_file(file).items()
    }


def test_every_tensor_of_several_files_comes_back(hub, imported, tmp_path):
    assert main(["export", str(imported), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    assert tensors(tmp_path / "again") == tensors(hub)
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: said[name] for name in CONFIG if name != "eos_token_id"} == {
        name: value for name, value in CONFIG.items() if name != "eos_token_id"
    }
    assert json.loads((tmp_path / "again" / "tokenizer.json").read_text()) == TOKENIZER
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == {"eos_token_id": 0}


def exported(theirs, home):
    """A directory imported and exported again."""
    assert main(["import", str(theirs), "--out", str(home / "model")]) == 0
    assert main(["export", str(home / "model"), "--format", "hf", "--out", str(home / "again")]) == 0
    return home / "again"


def rewritten(theirs, tensors):
    """A directory with other tensors, all in the single file."""
    for path in theirs.glob("model*"):
        path.unlink()
    numpy_files.save_file(tensors, theirs / "model.safetensors")


def arrays(path):
    return {name: array for file in path.glob("*.safetensors") for name, array in numpy_files.load_file(file).items()}


def test_experts_in_two_tensors_of_a_layer_are_read(hub, copy):
    """As transformers 5 keeps them in memory; tensors that follow from the configuration may be there, too."""
    stored = arrays(copy)
    at = "model.layers.1.mlp.experts"
    gate, up, down = (
        np.stack([stored.pop(f"{at}.{expert}.{name}_proj.weight") for expert in range(4)])
        for name in ("gate", "up", "down")
    )
    stored |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    rewritten(copy, stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert tensors(exported(copy, copy.parent)) == tensors(hub)


def test_an_expert_that_is_stored_twice_or_cut_is_refused(copy, capsys):
    stored, at = arrays(copy), "model.layers.1.mlp.experts"
    for added, line in (((4, 16, 16), "has model.layers.1.mlp.experts.0.gate_proj.weight twice"), ((4, 15, 16), "")):
        kept = stored if line else {name: of for name, of in stored.items() if f"{at}." not in name or "down" in name}
        rewritten(copy, kept | {f"{at}.gate_up_proj": np.zeros(added, np.float32)})
        assert main(["import", str(copy), "--out", str(copy.with_name("model"))]) == 2
        assert (line or "has (7, 16) for model.layers.1.mlp.experts.0.gate_proj.weight") in capsys.readouterr().err


def test_a_single_file_is_read_where_an_index_is_there_too(hub, copy):
    doubled = {name: 2 * array for name, array in arrays(hub).items()}
    numpy_files.save_file(doubled, copy / "model.safetensors")
    assert {name: array.tobytes() for name, array in arrays(exported(copy, copy.parent)).items()} == {
        name: array.tobytes() for name, array in doubled.items()
    }


@pytest.mark.parametrize("kind", ["equal", "different", "alone"])
def test_a_head_that_is_stored_although_it_is_tied(kind, tmp_path):
    """As transformers: tied where both are equal or one is there, and two matrices where they differ."""
    theirs = write(tmp_path / "theirs", CONFIG | {"tie_word_embeddings": True})
    stored, name = arrays(theirs), "model.embed_tokens.weight"
    head = stored[name] + (1 if kind == "different" else 0)
    before = stored | {"lm_head.weight": head}
    if kind == "alone":
        del before[name]
    rewritten(theirs, before)
    again = exported(theirs, tmp_path)
    expected = before if kind == "different" else stored
    assert {key: array.tobytes() for key, array in arrays(again).items()} == {
        key: array.tobytes() for key, array in expected.items()
    }
    assert json.loads((again / "config.json").read_text())["tie_word_embeddings"] is (kind != "different")


def test_what_stands_beside_the_weights_comes_back(tmp_path):
    """All tokens that end a text, sampling settings, the tokenizer's own files with its chat templates."""
    tokens = {"eos_token_id": [3, 0], "bos_token_id": 5, "pad_token_id": 7}
    theirs = write(tmp_path / "theirs", CONFIG | tokens)
    generation = {"eos_token_id": [3, 0, 99], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    beside = {
        "generation_config.json": json.dumps(generation),
        "tokenizer_config.json": json.dumps({"eos_token": "w3", "tokenizer_class": "PreTrainedTokenizerFast"}),
        "special_tokens_map.json": json.dumps({"eos_token": "w3"}),
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    (theirs / "additional_chat_templates").mkdir()
    for name, text in beside.items():
        (theirs / name).write_text(text)
    again = exported(theirs, tmp_path)
    for name in beside.keys() - {"generation_config.json"}:
        assert (again / name).read_text() == beside[name]
    said = json.loads((again / "config.json").read_text())
    assert {name: said[name] for name in tokens} == tokens | {"eos_token_id": [3, 0, 99]}
    assert json.loads((again / "generation_config.json").read_text()) == tokens | generation
    assert load_stored(tmp_path / "model", "MODEL", None).data.tokenizer.separator == 3
    again.rename(tmp_path / "theirs again")
    other = replace(load_stored(tmp_path / "model", "MODEL", None).data.tokenizer, path=str(tmp_path / "mine.json"))
    shutil.copyfile(theirs / "tokenizer.json", other.path)
    shutil.copyfile(theirs / "generation_config.json", tmp_path / "generation_config.json")  # of another tokenizer
    assert generation_of(other) == {"eos_token_id": 3}
    (tmp_path / "model" / "generation_config.json").write_text("[")
    assert main(["export", str(tmp_path / "model"), "--format", "hf", "--out", str(again)]) == 2
    assert not again.exists()


def test_a_tokenizer_alone_is_named_for_transformers(hub, tmp_path):
    """Else it would make the family's own class out of the vocabulary, and take its tokens for the ends of texts."""
    again = exported(hub, tmp_path)
    said = json.loads((again / "tokenizer_config.json").read_text())
    assert (said["tokenizer_class"], said["eos_token"]) == ("PreTrainedTokenizerFast", "<|endoftext|>")
    config = json.loads((again / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 0, None]


QWEN = {name: value for name, value in CONFIG.items() if name not in ("n_routed_experts", "n_shared_experts")} | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def test_rotations_are_those_of_rope_scaling_where_both_keys_are_there():
    plain = {"rope_type": "default", "rope_theta": 1e4}
    both = QWEN | {"rope_scaling": YARN, "rope_parameters": plain}
    for config, length in ((both, 8), (both | {"original_max_position_embeddings": 5}, 5)):
        found = read_decoder(config, "").model
        assert (found.rope_scaling, found.rope_factor, found.rope_length) == ("yarn", 4.0, length)
    refused = {
        "rope_theta = 10000.0 in rope_parameters, where rope_scaling": both | {"rope_theta": 1e6},
        "has rope_scaling.partial_rotary_factor = 0.5": QWEN | {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}},
        "has rope_parameters.full_attention =": QWEN | {"rope_parameters": {"full_attention": plain}},
        "has mscale = 0.7": QWEN | {"rope_scaling": YARN | {"mscale": 0.7}},
        "has num_experts = 4 and num_local_experts = 8": QWEN | {"num_local_experts": 8},
        "has layer_types = ": QWEN | {"layer_types": ["full_attention", "sliding_attention"]},
        "has norm_topk_prob = 'false', which is not true or false": QWEN | {"norm_topk_prob": "false"},
        "head_dim = 6: must be 8": CONFIG | {"head_dim": 6},
    }
    for line, config in refused.items():
        with pytest.raises(SettingError, match=re.escape(line)):
            read_decoder(config, "")


def test_gates_of_a_single_expert_are_as_the_family_has_them():
    """DeepSeek's code divides gates by their sum only where there are several; Qwen's does always."""
    for config, expected in ((CONFIG, (True, False)), (QWEN, (True, True))):
        normalized = config | {"norm_topk_prob": True}
        found = [read_decoder(normalized | {"num_experts_per_tok": k}, "").normalizes for k in (2, 1)]
        assert tuple(found) == expected


def test_the_auxiliary_loss_has_its_weight_in_either_unit():
    """transformers: top_k for balanced layers together; DeepSeek and Swift: 1 for each layer."""
    assert read_decoder(CONFIG | {"aux_loss_alpha": 0.003}, "").aux_loss_coefficient == 0.003
    for layers, top_k, coefficient in itertools.product((1, 3, 7, 48), (1, 2, 3), (0.0, 0.001, 0.013)):
        sizes = {"num_hidden_layers": layers, "num_experts_per_tok": top_k, "router_aux_loss_coef": coefficient}
        decoder = read_decoder(QWEN | sizes, "")
        assert decoder.aux_loss_coefficient * layers == pytest.approx(coefficient * top_k)
        assert write_decoder(decoder, "float32")["router_aux_loss_coef"] == coefficient


OF_HUB = Experiment(
    model=ModelConfig(
        moe_pattern=(True,), norm="rmsnorm", positions="rope", activation="swiglu", expert_dim=48, rope_length=77
    ),
    experts=ExpertConfig(top_k=2),
    placement=Static(),
)
DEEPSPEED = SlotCapacity(rules="deepspeed")


def test_a_run_is_written_for_the_family_that_computes_it():
    """What has no effect does not matter, and what a family does not compute is refused before anything is read."""

    def family(model=None, experts=None):
        model, experts = replace(OF_HUB.model, **model or {}), replace(OF_HUB.experts, **experts or {})
        decoder = decoder_of(replace(OF_HUB, model=model, experts=experts))
        return decoder.family.model_type, decoder.normalizes

    assert family() == ("mixtral", True)
    assert family({"qk_norm": "head"}) == ("qwen3_moe", True)
    assert family({"qk_norm": "projection"}) == ("olmoe", True)
    assert family({"num_dense_layers": 1}) == ("deepseek", True)
    assert family(experts={"capacity": DEEPSPEED}) == ("mixtral", True)
    assert family({"qk_norm": "head"}, {"capacity": DEEPSPEED, "top_k": 1}) == ("qwen3_moe", False)
    assert family({"head_dim": 48}) == ("mixtral", True)
    for model, experts in (
        ({"qk_norm": "projection", "head_dim": 48}, {}),  # the norm would have the model's width
        ({"num_dense_layers": 1, "head_dim": 48}, {}),
        ({"num_dense_layers": 1, "rope_scaling": "yarn", "rope_factor": 2.0}, {}),
        ({"num_dense_layers": 1}, {"top_k": 1, "router": TopK(normalize_gates=True)}),
    ):
        with pytest.raises(SettingError, match="the only ones that can be written for the hub"):
            family(model, experts)
    for router in (TopK(gate_scale=2.0), TopK("sigmoid"), TopK(bias_update_rate=0.1), NoisyTopK()):
        with pytest.raises(SettingError, match="only @TopK"):
            family(experts={"router": router})


def test_tied_embeddings_come_back(tmp_path):
    theirs = write(tmp_path / "theirs", CONFIG | {"tie_word_embeddings": True})
    assert main(["import", str(theirs), "--out", str(tmp_path / "model")]) == 0
    assert main(["export", str(tmp_path / "model"), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    assert tensors(tmp_path / "again") == tensors(theirs)
    assert "lm_head.weight" not in tensors(theirs)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is True


def test_prompts_begin_as_the_models_texts_did(tmp_path, monkeypatch):
    """A prompt begins with the token of config.json if the tokenizer adds it, and with nothing otherwise."""
    first = {"id": "w3", "type_id": 0}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": first}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"w3": {"id": "w3", "ids": [3], "tokens": ["w3"]}},
    }
    monkeypatch.setitem(TOKENIZER, "post_processor", template)
    for number, (begin, expected) in enumerate([(3, [3, 5, 6]), (4, [5, 6]), (None, [5, 6])]):
        theirs = write(tmp_path / f"{number}", CONFIG | {"bos_token_id": begin})
        tokenizer = import_hugging_face(theirs, tmp_path / f"{number}.model").data.tokenizer
        assert prompt_tokens(tokenizer, "w5 w6") == expected
        assert tokenizer.encode("w5 w6").tolist() == [5, 6]
    assert main(["export", str(tmp_path / "0.model"), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text())["bos_token_id"] == 3


def test_a_model_may_be_moved(hub, tmp_path):
    assert main(["import", str(hub), "--out", str(tmp_path / "first")]) == 0
    (tmp_path / "first").rename(tmp_path / "second")
    tokenizer = load_stored(tmp_path / "second", "MODEL", None).data.tokenizer
    assert tokenizer.path == str(tmp_path / "second" / "tokenizer.json")
    assert tokenizer.encode("w1").tolist() == [1]


def replaced(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


MISTAKES = {
    "another architecture": (
        lambda path: replaced(path / "config.json", '"deepseek"', '"llama"'),
        "is of model_type 'llama'; known are olmoe, mixtral, qwen3_moe, deepseek",
    ),
    "a part that is not computed": (
        lambda path: replaced(path / "config.json", '"silu"', '"relu"'),
        "has hidden_act = 'relu', which is not computed here",
    ),
    "a missing key": (
        lambda path: replaced(path / "config.json", '"hidden_size"', '"hidden"'),
        "has no hidden_size",
    ),
    "a missing file": (
        lambda path: (path / "model-00002-of-00002.safetensors").unlink(),
        "model-00002-of-00002.safetensors': is missing",
    ),
    "a cut file": (
        lambda path: cut(path / "model-00001-of-00002.safetensors"),
        "is not a whole safetensors file",
    ),
    "other sizes": (
        lambda path: replaced(path / "config.json", '"moe_intermediate_size": 8', '"moe_intermediate_size": 12'),
        "where its config.json asks for (16, 12)",
    ),
    "sizes that cannot be": (
        lambda path: replaced(path / "config.json", '"num_key_value_heads": 2', '"num_key_value_heads": 3'),
        "has sizes that do not fit: ModelConfig.num_kv_heads = 3: must divide",
    ),
    "a path in the index": (
        lambda path: replaced(path / "model.safetensors.index.json", "model-00001", "../model-00001"),
        "which is not the name of a file beside it",
    ),
    "a tokenizer larger than the vocabulary": (
        lambda path: replaced(path / "tokenizer.json", '"w19": 19', '"w19": 99'),
        "has 100 tokens, and vocab_size is 24 in config.json",
    ),
    "no end of a document": (
        lambda path: replaced(path / "config.json", '"eos_token_id": 0', '"eos_token_id": 77'),
        "has no token 77, which config.json names as eos_token_id",
    ),
    "an end of a document that is no number": (
        lambda path: replaced(path / "config.json", '"eos_token_id": 0', '"eos_token_id": [[0]]'),
        "has no token [[0]], which config.json names as eos_token_id",
    ),
    "a token whose number is none": (
        lambda path: replaced(path / "tokenizer.json", '"added_tokens": []', '"added_tokens": [{"id": [0]}]'),
        "tokenizer.json': is not a tokenizers file",
    ),
    "tokens that are no list": (
        lambda path: replaced(path / "tokenizer.json", '"added_tokens": []', '"added_tokens": 5'),
        "tokenizer.json': has added_tokens = 5, which is not a list",
    ),
    "rotations of no kind": (
        lambda path: replaced(path / "config.json", '"rope_theta"', '"rope_scaling": {"rope_type": []}, "rope_theta"'),
        "has rope_type = []; known are default, linear",
    ),
    "more experts for a token than there are": (
        lambda path: replaced(path / "config.json", '"num_experts_per_tok": 2', '"num_experts_per_tok": 9'),
        "has sizes that do not fit: ExpertConfig.top_k = 9",
    ),
    "a number that is none": (
        lambda path: replaced(path / "config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1e400'),
        "has num_hidden_layers = inf, which is not a whole number",
    ),
    "stretched otherwise": (
        lambda path: replaced(
            path / "config.json",
            '"rope_theta": 10000.0',
            '"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}',
        ),
        "has rope_type = 'yarn'; known are default, linear",
    ),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), "config.json': is not JSON"),
    "no tokenizer": (
        lambda path: (path / "tokenizer.json").unlink(),
        "tokenizer.json': cannot be read: No such file or directory",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_imported(name, copy, capsys):
    spoil, line = MISTAKES[name]
    spoil(copy)
    out = copy.with_name("model")
    assert main(["import", str(copy), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert line in error
    assert [path.name for path in copy.parent.iterdir()] == ["theirs"]


def test_a_directory_that_is_there_stays_as_it_is(hub, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["import", str(hub), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"swift: --out = '{tmp_path}': cannot be made a directory")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("kind", "epsilon", "theta"), [("olmoe", 1e-5, 1e4), ("mixtral", 1e-5, 1e6), ("qwen3_moe", 1e-6, 1e4)]
)
def test_what_a_configuration_leaves_out_is_as_its_class_has_it(kind, epsilon, theta):
    """Published configurations do leave these out."""
    left_out = ("rms_norm_eps", "rope_theta", "hidden_act")
    config = {name: value for name, value in CONFIG.items() if name not in left_out}
    found = read_decoder(config | {"model_type": kind, "num_local_experts": 4}, "").model
    assert (found.norm_epsilon, found.rope_theta) == (epsilon, theta)


def test_a_model_of_another_shape_is_no_model_of_the_hub(imported, tmp_path, capsys):
    config = json.loads((imported / "config.json").read_text())
    config["experiment"]["settings"]["experts"]["settings"]["router"]["settings"]["gate_scale"] = 2.0
    spoilt = shutil.copytree(imported, tmp_path / "model")
    (spoilt / "config.json").write_text(json.dumps(config))
    assert main(["export", str(spoilt), "--format", "hf", "--out", str(tmp_path / "out")]) == 2
    assert "only @TopK()" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_signal_leaves_nothing_of_a_model(hub, imported, tmp_path, monkeypatch, capfd):
    """Between two tensors: what is there already is removed."""
    calls, part_of = [], TensorLocation.part_of

    def kill_at_the_fifth(place, parameter):
        calls.append(place)
        if len(calls) == 5:
            assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
            os.kill(os.getpid(), signal.SIGTERM)
        return part_of(place, parameter)

    monkeypatch.setattr(TensorLocation, "part_of", kill_at_the_fifth)
    out = ["--out", str(tmp_path / "model")]
    for command in (["import", str(hub), *out], ["export", str(imported), "--format", "hf", *out]):
        calls.clear()
        assert main(command) == 130
        assert len(calls) == 5
        assert list(tmp_path.iterdir()) == []
        assert told_soon(capfd).startswith("swift: stopping; what is written will be removed")


def told_soon(capfd):
    """A line of stderr: a signal is answered by a thread, which may come later than the end of a command."""
    told, until = "", time.monotonic() + 20
    while not told.endswith("\n") and time.monotonic() < until:
        told += capfd.readouterr().err
        time.sleep(0.01)
    return told


def test_a_disk_without_room_is_not_filled(hub, imported, tmp_path, monkeypatch, capsys):
    room = [*os.statvfs(tmp_path)]
    room[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(room))
    for command in (["import", str(hub)], ["export", str(imported), "--format", "hf"]):
        assert main([*command, "--out", str(tmp_path / "model")]) == 3
        error = capsys.readouterr().err
        reason = r"model: the model cannot be written: No space left on device: \d+ bytes are needed, 0 are free\n"
        assert re.fullmatch(rf"swift: {tmp_path}/{reason}", error)
        assert list(tmp_path.iterdir()) == []


def test_a_type_goes_with_the_format_that_has_it(imported, tmp_path, capsys):
    assert main(["export", str(imported), "--dtype", "bfloat16", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "swift: --dtype = 'bfloat16': goes with --format hf, which is not set\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_begins_with_a_model_and_is_exported(hub, imported, tmp_path):
    """With a learning rate of nothing, what comes out after an iteration is what went in."""
    gin = tmp_path / "one.gin"
    decoder = read_decoder(CONFIG, "")
    settings = {
        name: getattr(decoder.model, name)
        for name in ("num_layers", "model_dim", "num_heads", "ffn_dim", "moe_pattern", "num_dense_layers", "expert_dim")
    }
    settings |= {"num_shared_experts": 1, "norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
    settings |= {"sequence_length": 8, "vocab_size": 24}
    lines = [f"ModelConfig.{name} = {value!r}" for name, value in settings.items()]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w1 w2 w3 w4 " * 400)
    gin.write_text(
        "\n".join(
            [
                "Experiment.model = @ModelConfig()",
                *lines,
                "Experiment.experts = @ExpertConfig()",
                "ExpertConfig.num_classes = 4",
                "ExpertConfig.top_k = 2",
                "TopK.normalize_gates = False",
                "Experiment.topology = @Topology()",
                "Topology.num_expert_ranks = 2",
                "Experiment.num_steps = 1",
                "Experiment.eval_every = 0",
                "Experiment.optimizer = @OptimizerConfig()",
                "OptimizerConfig.warmup_steps = 0",
                "OptimizerConfig.peak_learning_rate = 1e-30",
                "OptimizerConfig.final_learning_rate = 1e-30",
                "Experiment.data = @DataConfig()",
                "DataConfig.source = @TextFiles()",
                f"TextFiles.pattern = '{corpus}'",
                "DataConfig.tokenizer = @TokenizerFile()",
                f"TokenizerFile.path = '{hub / 'tokenizer.json'}'",
            ]
        )
    )
    run = tmp_path / "run"
    assert main(["train", str(gin), "--run-dir", str(run), "--init-from", str(imported)]) == 0
    assert main(["export", str(run), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    assert tensors(tmp_path / "again") == tensors(hub)
