"""DeepSeek-MoE-16B's architecture against a plain statement of it in torch, since ``transformers`` has no class for it.

The statement is written from the paper (arXiv 2401.06066) and the names of its published tensors: a dense layer first,
then routed experts whose gates are probabilities as they are, and shared ones; a token and a head at a time.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.cli.main import main
from swift.config.gin_reader import load_stored
from swift.models.reference_model import plain_logits
from swift.train.model_directory import load_exported

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

LENGTH, DIM, HEADS, EXPERTS, TOP_K, WIDTH, VOCABULARY, LAYERS = 10, 32, 4, 6, 3, 12, 40, 3
CONFIG = {
    "model_type": "deepseek",
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": LENGTH,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def drawn_tensors():
    """Random tensors by name, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (VOCABULARY, DIM), "lm_head": (VOCABULARY, DIM), "model.norm": (DIM,)}

    def network(at, width):
        for name, shape in (("gate", (width, DIM)), ("up", (width, DIM)), ("down", (DIM, width))):
            shapes[f"{at}.{name}_proj"] = shape

    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm": (DIM,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj": (DIM, DIM) for name in "qkvo"}
        if layer == 0:
            network(f"{at}.mlp", 48)
            continue
        shapes[f"{at}.mlp.gate"] = (EXPERTS, DIM)
        network(f"{at}.mlp.shared_experts", 2 * WIDTH)
        for expert in range(EXPERTS):
            network(f"{at}.mlp.experts.{expert}", WIDTH)
    return {
        f"{name}.weight": (0.25 * torch.randn(shape, generator=generator) + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def logits_of(tensors, tokens):
    """The model on a sequence; matrices are [out, in]."""
    of = lambda name: tensors[f"{name}.weight"]  # noqa: E731

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * of(name)

    def network(x, at):
        gate = of(f"{at}.gate_proj") @ x
        return of(f"{at}.down_proj") @ (gate * torch.sigmoid(gate) * (of(f"{at}.up_proj") @ x))

    def turned(channels, position):
        half = len(channels) // 2
        angles = torch.tensor([position * 10_000.0 ** (-2 * c / len(channels)) for c in range(half)])
        first, second = channels[:half], channels[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    def attention(xs, at):
        size, rows = DIM // HEADS, []
        for here in range(len(xs)):
            heads = []
            for head in range(HEADS):
                part = slice(head * size, (head + 1) * size)
                query = turned((of(f"{at}.q_proj") @ xs[here])[part], here)
                keys = [turned((of(f"{at}.k_proj") @ xs[t])[part], t) for t in range(here + 1)]
                weights = torch.softmax(torch.stack([query @ key for key in keys]) / math.sqrt(size), 0)
                values = torch.stack([(of(f"{at}.v_proj") @ xs[t])[part] for t in range(here + 1)])
                heads.append(weights @ values)
            rows.append(of(f"{at}.o_proj") @ torch.cat(heads))
        return torch.stack(rows)

    def mixture(x, at):
        probs = torch.softmax(of(f"{at}.gate") @ x, 0)
        chosen = torch.topk(probs.detach(), TOP_K).indices.tolist()
        return network(x, f"{at}.shared_experts") + sum(probs[e] * network(x, f"{at}.experts.{e}") for e in chosen)

    xs = of("model.embed_tokens")[tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        xs = xs + attention(norm(xs, f"{at}.input_layernorm"), f"{at}.self_attn")
        feed_forward = network if layer == 0 else mixture
        normed = norm(xs, f"{at}.post_attention_layernorm")
        xs = xs + torch.stack([feed_forward(x, f"{at}.mlp") for x in normed])
    return norm(xs, "model.norm") @ of("lm_head").T


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A directory as of the hub."""
    path = tmp_path_factory.mktemp("hub") / "deepseek"
    path.mkdir()
    safetensors.save_file(drawn_tensors(), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>")).save(
        str(path / "tokenizer.json")
    )
    return path


@pytest.fixture(scope="module")
def imported(hub):
    """The model directory made of it."""
    path = hub.with_name("imported")
    assert main(["import", str(hub), "--out", str(path)]) == 0
    return path


def test_logits_loss_and_gradients_are_the_statements(imported):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, LENGTH + 1)
    tensors = {name: leaf.float().requires_grad_() for name, leaf in drawn_tensors().items()}
    theirs = logits_of(tensors, torch.tensor(tokens[:-1]))
    loss = torch.nn.functional.cross_entropy(theirs, torch.tensor(tokens[1:]))
    loss.backward()

    experiment = load_stored(imported, "MODEL", None)
    gpt, weights = load_exported(experiment, imported)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)

    def mean_loss(weights):
        logits = plain_logits(gpt, experiment.experts, weights, tokens[None, :-1])[0]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=-1)
        return -jnp.mean(chosen), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(weights)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    found = {group: [_leaves(row) for row in rows] for group, rows in gradients.items()}
    for name, ours in _by_their_names(found):
        np.testing.assert_allclose(ours, tensors[f"{name}.weight"].grad.numpy(), rtol=1e-4, atol=2e-6, err_msg=name)
        del tensors[f"{name}.weight"]
    assert not tensors


def _leaves(row):
    return {
        ".".join(str(key.key) for key in path if hasattr(key, "key")): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(row)
    }


def _by_their_names(found):
    def network(at, leaves, prefix):
        for name in ("gate", "up", "down"):
            yield f"{at}.{name}_proj", leaves[f"{prefix}{name}.kernel"].T

    yield "model.embed_tokens", found["embedding"][0]["token_VD"]
    yield "lm_head", found["head"][0]["out.kernel"].T
    yield "model.norm", found["head"][0]["norm.scale"]
    for layer, attention in enumerate(found["attention"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm", attention["norm.scale"]
        for name, part in zip("qkv", np.split(attention["qkv.kernel"], 3, axis=1), strict=True):
            yield f"{at}.self_attn.{name}_proj", part.T
        yield f"{at}.self_attn.o_proj", attention["out.kernel"].T
        rest = found["mlp"][0] if layer == 0 else found["router"][layer - 1]
        yield f"{at}.post_attention_layernorm", rest["norm.scale"]
        if layer == 0:
            yield from network(f"{at}.mlp", rest, "ffn.")
            continue
        yield f"{at}.mlp.gate", rest["score.kernel"].T
        yield from network(f"{at}.mlp.shared_experts", rest, "shared.")
        for expert in range(EXPERTS):
            leaves = {name: leaf[expert] for name, leaf in found["expert"][layer - 1].items()}
            yield from network(f"{at}.mlp.experts.{expert}", leaves, "")


def test_every_tensor_comes_back_to_the_byte(hub, imported):
    out = hub.with_name("again")
    assert main(["export", str(imported), "--format", "hf", "--out", str(out)]) == 0
    there, here = (safetensors.load_file(path / "model.safetensors") for path in (hub, out))
    assert there.keys() == here.keys()
    assert all(tensor.dtype == here[name].dtype and torch.equal(tensor, here[name]) for name, tensor in there.items())
