"""The loss on the answers of chats against ``transformers`` with torch, which the extra ``peers`` brings."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint.units import by_name
from swift.cli.main import main
from swift.config.gin_reader import load_stored
from swift.data.operators import Chat
from swift.data.tokenizer import TokenizerFile
from swift.data.windows import Batch
from swift.experts.config import RankCapacity
from swift.hub.architectures import FAMILIES
from swift.hub.tensors import tensor_locations
from swift.mesh.per_rank import RANKED, SHARED
from swift.pipeline.state import TrainState
from swift.pipeline.step.single_worker import put_batch, single_worker_gradients
from swift.pipeline.step.spec import materialize_all
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.model_directory import load_exported, pure
from tests.data.chats import CHAT, CHATML, MARKED, write_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
numpy_files = pytest.importorskip("safetensors.numpy")

VOCABULARY, LENGTH, NUM_CLASSES = 60, 16, 4
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
    "num_experts": NUM_CLASSES,
    "num_experts_per_tok": 2,
    "intermediate_size": 12,
    "norm_topk_prob": False,
}


@pytest.fixture(scope="module")
def in_double():
    """Their norms, rotations and softmaxes are in float32, whatever the model: here they are not."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@pytest.fixture(scope="module")
def peer(tmp_path_factory, in_double):
    """A model with random weights in double precision, and the directory that it was saved in."""
    path = tmp_path_factory.mktemp("hub") / "olmoe"
    del in_double
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("olmoe", **CONFIG),
        attn_implementation="eager",
        experts_implementation="eager",
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<|endoftext|>")).save(str(path / "tokenizer.json"))
    return model, path


@pytest.mark.usefixtures("x64")
def test_the_loss_of_weighted_tokens_and_its_gradients_are_theirs(peer, tmp_path):
    """Labels of -100 are weights of 0: two micro-batches on two ranks against one batch of the model of the hub."""
    model, path = peer
    assert main(["import", str(path), "--out", str(tmp_path / "model")]) == 0
    random = np.random.default_rng(0)
    tokens_BT = random.integers(0, VOCABULARY, (8, LENGTH))
    weights_BT = (random.random((8, LENGTH)) < 0.4).astype(np.float32)
    weights_BT[3] = 0

    model.zero_grad()
    labels_BT = np.where(weights_BT > 0, tokens_BT, -100)
    loss = model(torch.tensor(tokens_BT), labels=torch.tensor(labels_BT)).loss  # they shift the labels
    loss.backward()
    gradients_path = tmp_path / "gradients"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad
    model.save_pretrained(gradients_path)  # gradients under the names of tensors
    theirs = numpy_files.load_file(gradients_path / "model.safetensors")

    stored = load_stored(tmp_path / "model", "MODEL", None)
    experiment = replace(
        stored,
        experts=replace(
            stored.experts, aux_loss_coefficient=0.0, capacity=RankCapacity(None), slots_per_rank=NUM_CLASSES // 2
        ),
        topology=Topology(num_expert_ranks=2),
        model=replace(stored.model, sequence_length=LENGTH - 1),
        num_microbatches=2,
        sequences_per_microbatch=4,
        compute_dtype="float64",
    )
    gpt, tree = load_exported(stored, tmp_path / "model")
    params = gpt.pack(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree))
    spec = replace(make_step_spec(experiment), weighs_tokens=True)
    placement_LNS = np.tile(np.arange(NUM_CLASSES, dtype=np.int32).reshape(2, -1), (2, 1, 1))

    def gradients_of(master, placement_LNS, batch):
        slots = materialize_all(spec, master, placement_LNS)
        return single_worker_gradients(spec, TrainState(None, None, None, slots, placement_LNS, None), batch)

    shape = (2, 4, LENGTH - 1)
    leaves = tokens_BT[:, :-1].astype(np.int32), tokens_BT[:, 1:].astype(np.int32), np.ones(shape, bool)
    batch = Batch(*(leaf.reshape(shape) for leaf in leaves), weights=weights_BT[:, 1:].reshape(shape))
    master = {name: spec.layouts[name].init(p, None)[None] for name, p in jax.device_get(params).items()}
    inputs = spec.live.put((master, placement_LNS[None]), (RANKED, SHARED))
    program = jax.jit(spec.live.per_rank(gradients_of, (RANKED, SHARED, RANKED), (RANKED, SHARED)))
    gradients, sums = jax.device_get(program(*inputs, put_batch(batch, spec.live)))

    assert sums.weight[0] == weights_BT[:, 1:].sum()
    np.testing.assert_allclose(sums.loss[0] / sums.weight[0], loss.item(), rtol=1e-10)
    whole = {name: spec.layouts[name].classes(g[0], None) for name, g in gradients.items()}
    arrays = {name: np.asarray(leaf) for name, leaf in by_name(pure(spec.gpt.unpack(whole))).items()}
    family = FAMILIES[json.loads((path / "config.json").read_text())["model_type"]]
    places = list(tensor_locations(family, gpt))
    assert {place.name for place in places} == set(theirs)
    for place in places:
        wanted, part = theirs[place.name], place.part_of(arrays[place.parameter])
        assert wanted.dtype == np.float64
        np.testing.assert_allclose(part, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max(), err_msg=place.name)


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_tokens_and_answers_of_a_chat_are_theirs(tmp_path, template):
    """Without marks they only give the tokens; the marks of the other template give the answers of both."""
    own = write_tokenizer(tmp_path, template, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Chat(TokenizerFile(own.path, "<|end|>")).function({"messages": CHAT})
    theirs = tokenizer.apply_chat_template(CHAT, return_dict=True)
    np.testing.assert_array_equal(ours["tokens"], theirs["input_ids"])
    marked = tokenizer.apply_chat_template(
        CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    np.testing.assert_array_equal(ours["weights"], marked["assistant_masks"])
    assert 0 < ours["weights"].sum() < len(ours["tokens"])
