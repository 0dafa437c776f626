"""Models of the hub against ``transformers`` with torch, which the extra ``peers`` brings."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint import by_name
from swift.cli.configuration import load_stored
from swift.cli.main import main
from swift.experts import ExpertConfig, dropless_moe
from swift.models import plain_logits
from swift.models.hugging_face import FAMILIES, tensor_locations
from swift.train import load_exported
from swift.train.checkpoints import pure

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
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()


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

    experts = ExpertConfig(classes, top_k=top_k, scores="sigmoid", normalize_gates=True, gate_scale=2.5)
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
        bias_E = jnp.asarray(layer.gate.e_score_correction_bias.numpy())
        every = lambda x: network(jnp.broadcast_to(x, (classes, *x.shape)), expert)  # noqa: E731
        return dropless_moe(experts, x_TD @ parts["gate.weight"].T, x_TD, every, bias_E) + network(x_TD, shared)

    found, pull_back = jax.vjp(ours, jnp.asarray(x.detach().numpy()[0]))
    # Outputs are tens here, and float32 rounds by the size of the largest terms of a sum.
    expected = theirs.detach().numpy()[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(pull_back(jnp.asarray(dy.numpy()[0]))[0], x.grad.numpy()[0], rtol=1e-4, atol=1e-4)
