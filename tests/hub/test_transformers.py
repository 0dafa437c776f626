"""Models of the hub against ``transformers`` with torch, which the extra ``peers`` brings."""

import dataclasses
import importlib
import json
import shutil
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint.units import by_name
from swift.cli.main import main
from swift.config.gin_reader import load_stored
from swift.experts.config import ExpertConfig
from swift.experts.reference import dropless_moe
from swift.experts.routers import TopK
from swift.experts.routing import balance_loss, count_choices
from swift.hub.architectures import FAMILIES, read_decoder
from swift.hub.tensors import tensor_locations
from swift.models.reference_model import plain_logits
from swift.train.model_directory import load_exported, pure

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
numpy_files = pytest.importorskip("safetensors.numpy")

VOCABULARY, LENGTH = 320, 16
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
KINDS = {
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "norm_topk_prob": False},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "bos_token_id": 300,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "norm_topk_prob": True,
    },
}
KINDS["qwen3_moe, tied"] = KINDS["qwen3_moe"] | {"tie_word_embeddings": True}


@pytest.fixture(scope="module", params=KINDS)
def hub(request, tmp_path_factory):
    """A directory of a model with random bfloat16 weights, and the model that ``transformers`` reads from it."""
    path = tmp_path_factory.mktemp("hub") / request.param
    kind, _, _ = request.param.partition(",")
    config = transformers.AutoConfig.for_model(kind, **COMMON | KINDS[request.param])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if config.bos_token_id is not None:
        tokenizer.add_special_tokens(["<s>"])
        begun = [("<s>", config.bos_token_id)]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=begun)
    tokenizer.save(str(path / "tokenizer.json"))
    return path, read_peer(path)


def read_peer(path):
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()
    # Out of the file's memory: torch adds in another order where a tensor begins at another multiple of 64 bytes.
    for parameter in peer.parameters():
        parameter.data = parameter.data.clone()
    return peer


@pytest.fixture(scope="module")
def imported(hub):
    """The model directory made of it."""
    path = hub[0].with_name("imported")
    assert main(["import", str(hub[0]), "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def ours(imported):
    """(architecture, settings of the experts, weights) of the model directory."""
    experiment = load_stored(imported, "MODEL", None)
    gpt, weights = load_exported(experiment, imported)
    return gpt, experiment.experts, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)


def batch():
    tokens = np.random.default_rng(0).integers(0, 300, (2, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def test_logits_are_theirs(hub, ours):
    gpt, experts, weights = ours
    inputs, _ = batch()
    with torch.no_grad():
        theirs = hub[1](torch.tensor(inputs)).logits.numpy()
    found = jax.jit(lambda weights: plain_logits(gpt, experts, weights, inputs))(weights)
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(found, theirs, atol=1e-5)


def test_loss_and_gradients_are_theirs(hub, ours):
    gpt, experts, weights = ours
    inputs, labels = batch()
    model = hub[1]
    model.zero_grad()
    logits = model(torch.tensor(inputs)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), torch.tensor(labels).reshape(-1))
    loss.backward()
    path = hub[0].with_name("gradients")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.grad, parameter.data
    model.save_pretrained(path)  # gradients under the names of tensors
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.grad, None
    theirs = numpy_files.load_file(path / "model.safetensors")

    def mean_loss(weights):
        log_probs = jax.nn.log_softmax(plain_logits(gpt, experts, weights, inputs))
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))

    found, gradients = jax.jit(jax.value_and_grad(mean_loss))(weights)
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    arrays = {name: np.asarray(leaf) for name, leaf in by_name(pure(gradients)).items()}
    family = FAMILIES[json.loads((hub[0] / "config.json").read_text())["model_type"]]
    places = list(tensor_locations(family, gpt))
    assert {place.name for place in places} == set(theirs)
    for place in places:
        part = place.part_of(arrays[place.parameter])
        np.testing.assert_allclose(part, theirs[place.name], rtol=1e-4, atol=1e-6, err_msg=place.name)


def test_every_tensor_comes_back_to_the_byte(hub, imported):
    out = hub[0].with_name("again")
    assert main(["export", str(imported), "--format", "hf", "--out", str(out)]) == 0
    there, here = (numpy_files.load_file(path / "model.safetensors") for path in (hub[0], out))
    assert {name: (a.dtype, a.tobytes()) for name, a in there.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in here.items()
    }
    again, (inputs, _) = read_peer(out), batch()
    with torch.no_grad():
        assert torch.equal(again(torch.tensor(inputs)).logits, hub[1](torch.tensor(inputs)).logits)


def test_greedy_text_is_theirs(hub, imported, capsys):
    tokenizer = tokenizers.Tokenizer.from_file(str(hub[0] / "tokenizer.json"))
    prompt = "w7 w42"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    count = LENGTH - ids.shape[1]
    theirs = hub[1].generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, use_cache=True)[0]
    command = ["generate", str(imported), "--prompt", prompt, "--tokens", str(count), "--temperature", "0"]
    assert main(command) == 0
    text = tokenizer.decode(theirs.tolist(), skip_special_tokens=False)
    assert capsys.readouterr().out.rstrip("\n") == text.removeprefix("<s> ")  # which is read, and not shown


def test_a_router_with_a_bias_is_theirs():
    """Sigmoid scores, biases that choose, a factor, a shared expert: the layer of DeepSeek-V3, and its gradients."""
    classes, top_k, dim, width = 8, 3, 16, 12
    config = transformers.DeepseekV3Config(
        hidden_size=dim,
        moe_intermediate_size=width,
        n_routed_experts=classes,
        num_local_experts=classes,
        num_experts_per_tok=top_k,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    module = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    layer = module.DeepseekV3MoE(config)
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.tensor(0.5 * random.standard_normal(parameter.shape)))
        layer.gate.e_score_correction_bias.copy_(torch.tensor(0.3 * random.standard_normal(classes)))
    x = torch.tensor(random.standard_normal((1, 20, dim)), dtype=torch.float32, requires_grad=True)
    dy = torch.tensor(random.standard_normal((1, 20, dim)), dtype=torch.float32)
    theirs = layer(x)
    theirs.backward(dy)

    experts = ExpertConfig(classes, top_k=top_k, router=TopK("sigmoid", normalize_gates=True, gate_scale=2.5))
    parts = {name: of.detach().numpy() for name, of in layer.named_parameters()}
    gate_up = parts["experts.gate_up_proj"].swapaxes(1, 2)
    expert = {
        "gate": gate_up[..., :width],
        "up": gate_up[..., width:],
        "down": parts["experts.down_proj"].swapaxes(1, 2),
    }
    shared = {name: parts[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up", "down")}

    def network(x, of):
        return jax.nn.silu(x @ of["gate"]) * (x @ of["up"]) @ of["down"]

    def ours(x_TD):
        state = {"bias_E": jnp.asarray(layer.gate.e_score_correction_bias.numpy())}
        every = lambda x: network(jnp.broadcast_to(x, (classes, *x.shape)), expert)  # noqa: E731
        return dropless_moe(experts, x_TD @ parts["gate.weight"].T, x_TD, every, state) + network(x_TD, shared)

    found, pull_back = jax.vjp(ours, jnp.asarray(x.detach().numpy()[0]))
    # Outputs are tens here, and float32 rounds by the size of the largest terms of a sum.
    expected = theirs.detach().numpy()[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(pull_back(jnp.asarray(dy.numpy()[0]))[0], x.grad.numpy()[0], rtol=1e-4, atol=1e-4)


def config_of(path):
    return json.loads((path / "config.json").read_text())


def rewritten(path, changed):
    (path / "config.json").write_text(json.dumps(config_of(path) | changed))


def other_value(key, value):
    """A value of a key that means something else than the one that is there."""
    special = {
        "hidden_act": "gelu",
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "sliding_window": 3,
        "clip_qkv": 0.1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 3.0},
        "layer_types": ["sliding_attention"] * 3,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 5,
        "attention_chunk_size": 4,
        "is_causal": False,
        "rope_theta": 300.0,
        "head_dim": 16,
        "dtype": "float32",
    }
    if key in special:
        return special[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 2 * value + 0.125 if isinstance(value, float) else 7


NOT_OF_MODELS = {"transformers_version", "architectures", "model_type", "id2label", "label2id", "problem_type"}
NOT_OF_MODELS |= {"return_dict", "is_encoder_decoder", "output_attentions", "output_hidden_states"}
OF_ALL = ("layer_types", "partial_rotary_factor", "is_causal", "attention_chunk_size")
OF_ALL += ("rope_scaling", "rope_theta", "original_max_position_embeddings")


@pytest.mark.parametrize("kind", ["olmoe", "mixtral", "qwen3_moe"])
def test_every_key_of_a_configuration_is_read_or_refused_or_has_no_effect(kind, tmp_path, capsys):
    """Each key of the library's class, changed alone: logits are theirs, or a line names the key or a size."""
    head_dim = {"head_dim": 8} if kind == "mixtral" else {}  # with null transformers 5.24 fails to compute YaRN
    theirs = transformers.AutoConfig.for_model(kind, **COMMON | KINDS[kind] | head_dim)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCABULARY - 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    path, kept = tmp_path / "theirs", config_of(tmp_path / "theirs")
    keys = {field.name for field in dataclasses.fields(type(theirs))} | {*kept, *OF_ALL}
    inputs, _ = batch()
    decoders, outcomes = {}, {}
    for key in sorted(keys - NOT_OF_MODELS):
        (path / "config.json").write_text(json.dumps(kept))
        rewritten(path, {key: other_value(key, kept.get(key))})
        out = tmp_path / key
        if main(["import", str(path), "--out", str(out)]) == 2:
            line = capsys.readouterr().err
            assert key in line or "has sizes that do not fit" in line or "asks for" in line
            outcomes[key] = "refused"
            continue
        experiment = load_stored(out, "MODEL", None)
        said = repr((experiment.model, experiment.experts.top_k, experiment.experts.router))
        if said not in decoders:
            gpt, weights = load_exported(experiment, out)
            experts = experiment.experts
            decoders[said] = np.asarray(jax.jit(lambda w, g=gpt, e=experts: plain_logits(g, e, w, inputs))(weights))
        with torch.no_grad():
            expected = read_peer(path)(torch.tensor(inputs)).logits.numpy()
        np.testing.assert_allclose(decoders[said], expected, atol=1e-4, err_msg=key)
        outcomes[key] = said
    plain = outcomes["initializer_range"]
    assert outcomes["use_cache"] == plain
    for key in ("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"):
        assert outcomes[key] != plain or key == "rope_theta"  # which stands in rope_parameters
    assert {key for key, outcome in outcomes.items() if outcome == "refused"} >= {"hidden_act", "layer_types"}


def drawn_shape(random, kind):
    """A small configuration with parts that are seldom together."""
    pick = random.choice
    heads = pick([1, 2, 3, 4, 6])
    channels, experts = pick([2, 4, 6, 10, 14]), pick([2, 3, 5, 8])
    shape = {
        "hidden_size": heads * channels,
        "num_hidden_layers": pick([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": pick([count for count in range(1, heads + 1) if heads % count == 0]),
        "max_position_embeddings": pick([16, 64]),
        "tie_word_embeddings": pick([False, True]),
        "eos_token_id": pick([0, [0, 3], [3, 0]]),
        "bos_token_id": pick([None, 5]),
        "pad_token_id": pick([None, 0, 7]),
        "intermediate_size": pick([6, 17]),
        "num_experts_per_tok": pick([1, 2]),
        "router_aux_loss_coef": pick([0.0, 0.001, 0.013]),
        "num_local_experts" if kind == "mixtral" else "num_experts": experts,
    }
    if kind != "olmoe":
        shape |= {"head_dim": channels, "hidden_size": pick([9, 10, 12])}
    if kind != "mixtral":
        shape |= {"norm_topk_prob": pick([False, True])}
    if kind == "qwen3_moe":
        shape |= {"moe_intermediate_size": pick([4, 11])}
    rope = {"rope_type": pick(["default", "linear", "yarn"]), "rope_theta": pick([2.0, 500.0, 1e4, 1e6])}
    if rope["rope_type"] != "default":
        rope |= {"factor": pick([1.0, 2, 4.0])}
    if rope["rope_type"] == "yarn":
        rope |= {"original_max_position_embeddings": pick([2, 8, 4096, 100_000])}
    return COMMON | shape | {"vocab_size": pick([20, 33]), "rope_parameters": rope}


@pytest.mark.parametrize("kind", ["olmoe", "mixtral", "qwen3_moe"])
def test_shapes_of_all_kinds_go_in_and_come_back(kind, tmp_path):
    random = Random(kind)
    for number in range(6):
        config, at = drawn_shape(random, kind), tmp_path / str(number)
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(at / "theirs", save_original_format=bool(number % 2))
        words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 20)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(at / "theirs" / "tokenizer.json"))
        assert main(["import", str(at / "theirs"), "--out", str(at / "model")]) == 0
        assert main(["export", str(at / "model"), "--format", "hf", "--out", str(at / "again")]) == 0
        inputs = np.random.default_rng(number).integers(0, 20, (2, 12))
        with torch.no_grad():
            theirs, again = (read_peer(at / name)(torch.tensor(inputs)).logits for name in ("theirs", "again"))
        assert torch.equal(theirs, again)
        experiment = load_stored(at / "model", "MODEL", None)
        found = plain_logits(*_loaded(experiment, at / "model"), inputs)
        np.testing.assert_allclose(found, theirs.numpy(), atol=2e-5 * float(theirs.abs().max()), err_msg=str(config))
        said = config_of(at / "again")
        for key in ("eos_token_id", "bos_token_id", "pad_token_id", "router_aux_loss_coef"):
            assert said[key] == config[key]
        assert transformers.GenerationConfig.from_pretrained(at / "again").eos_token_id == config["eos_token_id"]
        text = "w1 w2  w19 foo\nw4"
        ids = transformers.AutoTokenizer.from_pretrained(at / "again")(text).input_ids
        assert ids == tokenizer.encode(text).ids


def _loaded(experiment, path):
    gpt, weights = load_exported(experiment, path)
    return gpt, experiment.experts, weights


def test_the_auxiliary_loss_of_balanced_layers_is_theirs():
    """The same logits in every layer: theirs, pooled, is top_k times one of ours, and ours are as many as layers."""
    module = importlib.import_module("transformers.models.olmoe.modeling_olmoe")
    for layers, classes, top_k in ((1, 5, 1), (3, 8, 2), (7, 8, 4)):
        logits = np.random.default_rng(layers).normal(size=(64, classes)).astype(np.float32)
        theirs = module.load_balancing_loss_func((torch.tensor(logits),) * layers, classes, top_k).item()
        routing = TopK().choose(jnp.asarray(logits), top_k)
        counts = count_choices(routing.choices_TK, jnp.ones(routing.choices_TK.shape, bool), classes)
        ours = layers * float(balance_loss(routing.probs_TE, jnp.ones(64, bool), counts, jnp.int32(64), top_k))
        sizes = {"num_hidden_layers": layers, "num_experts": classes, "num_experts_per_tok": top_k}
        config = transformers.AutoConfig.for_model("olmoe", **COMMON | KINDS["olmoe"] | sizes).to_dict()
        decoder = read_decoder(config | {"router_aux_loss_coef": 0.01}, "")
        assert decoder.aux_loss_coefficient * ours == pytest.approx(0.01 * theirs, rel=1e-5)


def test_a_tokenizer_of_ones_own_is_read_as_it_is(hub, tmp_path):
    """Without a class in tokenizer_config.json the family's own would be made of vocabulary and merges."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=False)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, tokenizers.pre_tokenizers.ByteLevel()])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<eod>"], initial_alphabet=alphabet)
    own.train_from_iterator(["the year 2024 and 2025 don't stop"] * 50, trainer)
    theirs = tmp_path / "theirs"
    shutil.copytree(hub[0], theirs)
    own.save(str(theirs / "tokenizer.json"))
    assert main(["import", str(theirs), "--out", str(tmp_path / "model")]) == 0
    assert main(["export", str(tmp_path / "model"), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert found.eos_token_id == 0
    for text in ("the year 2024 don't stop", "  2025\u00e9 \u4f60 <eod>the\n\n"):
        assert found(text).input_ids == own.encode(text).ids
