"""lm-eval drives the engine, with tasks of local files; where it is installed (`make test-eval`)."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError
from swift.evaluate.tasks import Question, Selection

with warnings.catch_warnings(action="ignore"):  # those of lm-eval and its libraries
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]

TASKS = {
    "picked": """
output_type: multiple_choice
doc_to_text: "Q: {{question}} A:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "written": """
output_type: generate_until
doc_to_text: "Q: {{question}} A:"
doc_to_target: "{{text}}"
generation_kwargs:
  until: ["{{stop}}"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list:
  - metric: byte_perplexity
""",
}
ROWS = [
    {"question": question, "choices": choices, "answer": number % len(choices), "long": long}
    for number, (question, choices, long) in enumerate(
        [
            ("e", ["f", "something long", "g"], "short"),
            ("h", ["no", "none", "i"], "x" * 64),
            ("j", ["k", "some other words"], "a text that is longer than the positions of the model " * 3),
        ]
    )
]


@pytest.fixture
def run(tmp_path, whole):
    """Runs a task of lm-eval; returns (its results, what it logged of each row)."""

    def evaluate(name, rows, **shared):
        from swift.evaluate.harness import EngineLM

        (tmp_path / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = TASKS[name]
        for key, value in shared.items():
            settings = settings.replace("{{" + key + "}}", value)
        text = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'rows.json'}\n"
        text += f"  cache_dir: {tmp_path / 'cache'}\n"
        (tmp_path / "task.yaml").write_text(f"{text}test_split: train\n{settings}")
        manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
        model = EngineLM(whole.engine(), ByteTokenizer())
        found = lm_eval.simple_evaluate(model, tasks=[name], task_manager=manager, bootstrap_iters=0)
        return found["results"][name], sorted(found["samples"][name], key=lambda sample: sample["doc_id"])

    return evaluate


def test_multiple_choice_is_that_of_our_own_tasks(run, whole):
    results, samples = run("picked", ROWS)
    questions = [
        Question(
            number,
            "picked",
            f"Q: {row['question']} A:",
            Selection(tuple(f" {one}" for one in row["choices"]), row["answer"]),
        )
        for number, row in enumerate(ROWS)
    ]
    judgements = whole.asked(questions)
    for judgement, sample in zip(judgements, samples, strict=True):
        found = [float(response[0][0]) for response in sample["resps"]]
        np.testing.assert_allclose(found, judgement.log_probs, rtol=1e-5)
        assert (sample["acc"], sample["acc_norm"]) == tuple(map(float, judgement.correct.values()))
    means = np.mean([list(judgement.correct.values()) for judgement in judgements], axis=0)
    assert (results["acc,none"], results["acc_norm,none"]) == pytest.approx(tuple(means))


def test_texts_are_those_of_the_whole_model(run, whole):
    prompts = [f"Q: {row['question']} A:" for row in ROWS]
    free = [whole.continued(prompt.encode(), 6, ()) for prompt in prompts]
    stop = next(text[at] for text in free for at in range(1, len(text)) if text[at].isascii())
    texts = [whole.continued(prompt.encode(), 6, (stop,)) for prompt in prompts]
    rows = [row | {"text": text} for row, text in zip(ROWS, [*texts[:2], "something else"], strict=True)]
    results, samples = run("written", rows, stop=json.dumps(stop)[1:-1])
    assert [sample["resps"][0][0] for sample in samples] == texts
    assert results["exact_match,none"] == pytest.approx(2 / 3)


def test_whole_texts_are_scored_window_by_window(run, whole):
    results, samples = run("read", ROWS)
    total = count = 0
    for row, sample in zip(ROWS, samples, strict=True):
        tokens, positions = [0, *row["long"].encode()], whole.gpt.config.sequence_length
        expected = 0.0
        for at in range(1, len(tokens)):
            # Windows of as many tokens as there are positions; the last one begins where it is full, too.
            window_end = min(-(-at // positions) * positions, len(tokens) - 1)
            expected += whole.score(tokens[max(0, window_end - positions) : at], tokens[at : at + 1])
        assert float(np.ravel(sample["resps"])[0]) == pytest.approx(expected, rel=1e-4)
        total, count = total + expected, count + len(tokens) - 1
    assert results["byte_perplexity,none"] == pytest.approx(np.exp(-total / count), rel=1e-4)


def test_a_setting_that_the_engine_does_not_know(whole):
    from lm_eval.api.instance import Instance

    from swift.evaluate.harness import EngineLM

    model = EngineLM(whole.engine(), ByteTokenizer())
    request = Instance("generate_until", {}, ("x", {"until": [], "repetition_penalty": 2.0}), 0)
    with pytest.raises(SettingError, match=r"gen_kwargs\.repetition_penalty = 2\.0: is not known; there are do_sample"):
        model.generate_until([request])


def test_texts_begin_as_prompts_do(whole, tmp_path):
    """The token that prompts begin with stands before a text, unless the text has it or lm-eval wants none."""
    from swift.evaluate.harness import EngineLM

    words = {"<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 20)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "</s>"}
    split = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model}))
    begun = TokenizerFile(str(tmp_path / "tokenizer.json"), end_of_document="</s>", begin_of_prompt="<s>")
    for tokenizer, before in ((begun, [1]), (replace(begun, begin_of_prompt=None), [])):
        found = EngineLM(whole.engine(), tokenizer)
        assert found.tok_encode("w5 w6") == [*before, 5, 6]
        assert found.tok_encode("<s> w5") == [1, 5]
        assert found.tok_encode("w5", add_special_tokens=False) == [5]
        assert (found.prefix_token_id, found.eot_token_id) == (before[0] if before else 2, 2)
        assert found._encode_pair("w5", " w6") == ([*before, 5], [6])
        request, _ = found._continuing(0, "w5", {"until": ["w9"], "max_gen_toks": 2})
        assert list(request.tokens) == [*before, 5]
