"""``swift evaluate``: runs, their checkpoints and exported models, stopped and resumed."""

import json
import os
import signal
from pathlib import Path

import pytest

from swift.evaluate.results import read_evaluations
from swift.evaluate.scoring import ask

MODULE = "swift.cli.evaluate"
LINES = [
    {"task": "written", "max_tokens": 3},
    *({"task": "picked", "prompt": f"{word} ", "choices": ["beta", "gamma delta"], "answer": 1} for word in "abcdef"),
    *({"task": "written", "prompt": f"alpha {word}", "pattern": "a"} for word in ("be", "ga", "a longer text")),
]


@pytest.fixture
def asked(half):
    """A run, and a task file beside it."""
    (half.parent / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return half


def same(one, other):
    """Whether two judgements are the same but for rounding: what is computed together depends on what is asked."""
    facts = [(each.line, each.task, each.correct, each.text, each.unseen_tokens) for each in (one, other)]
    if one.log_probs is None:
        return facts[0] == facts[1] and other.log_probs is None
    return facts[0] == facts[1] and other.log_probs == pytest.approx(one.log_probs, rel=1e-4)


def answers(path):
    """Answers of models, without the names of models and the time."""
    return [(one.is_complete, one.judgements) for one in read_evaluations(Path(path))]


@pytest.mark.usefixtures("asked")
def test_a_run_is_asked_and_its_report_shows_the_answers(tell):
    told = tell("evaluate", "half", "--tasks", "mine.jsonl")
    assert (told.code, told.new) == (0, ["half/evaluations", "half/evaluations/mine-4.json"])
    assert "half: 9 questions\n" in told.err
    assert "picked" in told.out
    assert "results: half/evaluations/mine-4.json\n" in told.out
    assert "half: 1 of 9 questions are longer than its positions; it has seen their ends\n" in told.out
    ((is_complete, judgements),) = answers("half/evaluations/mine-4.json")
    assert is_complete
    assert [judgement.line for judgement in judgements] == list(range(2, 11))
    score = json.loads(Path("half/evaluations/mine-4.json").read_text())["models"][0]["scores"][0]
    assert tell("report", "half", "--out", "page.html").code == 0
    row = f"{100 * score['share']:.1f}</span></td>"
    assert row in Path("page.html").read_text().partition("Answers to tasks")[2]


@pytest.mark.usefixtures("asked")
def test_checkpoints_and_their_exports_answer_alike(tell):
    """Side by side, in one file; nothing is written beside the models."""
    assert tell("export", "half", "--step", "2", "--out", "model").code == 0
    told = tell("evaluate", "model", "half", "--step", "2", "--tasks", "mine.jsonl", "--out", "all.json")
    assert told.code == 2  # a model has no steps
    assert "--step = 2: is for a run, and model is a model" in told.err
    assert tell("evaluate", "half", "--step", "2", "--tasks", "mine.jsonl").new[1:] == ["half/evaluations/mine-2.json"]
    told = tell("evaluate", "model", "half", "--tasks", "mine.jsonl", "--out", "all.json", "--format", "json")
    assert (told.code, told.new) == (0, ["all.json"])
    model, newest = answers("all.json")
    assert answers("half/evaluations/mine-2.json") == [model]
    assert newest != model
    document = json.loads(told.out)
    assert [one["step"] for one in document["models"]] == [None, 4]
    assert {(one["model"], one["less"]) for one in document["differences"]} == {("half", "model")}
    assert len(document["differences"]) == 3


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("where", [(), ("--out", "mine.json")], ids=["beside", "out"])
def test_what_is_stopped_goes_on(tell, monkeypatch, where):
    path = where[1] if where else "half/evaluations/mine-4.json"
    arguments = ("evaluate", "half", "--tasks", "mine.jsonl", *where)
    assert tell(*arguments).code == 0
    expected = answers(path)[0][1]
    Path(path).unlink()
    counts, signals = [], []

    def stopped(engine, tokenizer, questions):
        counts.append(len(questions))
        for judgements in ask(engine, tokenizer, questions):
            yield judgements
            if judgements and not signals:
                signals.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("swift.evaluate.scoring._CALLS", 1)
    monkeypatch.setattr(f"{MODULE}.ask", stopped)
    told = tell(*arguments)
    assert told.code == 130
    ((is_complete, part),) = answers(path)
    assert not is_complete
    assert 0 < len(part) < 9
    told = tell(*arguments, "--resume")
    assert told.code == 0
    assert f"half: 9 questions, {len(part)} of them answered before\n" in told.err
    assert counts == [9, 9 - len(part)]
    ((is_complete, all_of_them),) = answers(path)
    assert is_complete
    assert all(one in all_of_them for one in part)
    assert all(map(same, all_of_them, expected))
    with Path("mine.jsonl").open("a") as file:
        file.write("\n")
    told = tell(*arguments, "--resume")
    assert told.code == 2
    assert "has answers to other questions; leave it out to begin anew" in told.err
    assert answers(path) == [(True, all_of_them)]


def test_every_wrong_line_of_a_task_file_is_named(asked, tell):
    lines = [LINES[1], LINES[1] | {"answer": 2}, LINES[1], LINES[7] | {"stop": ""}]
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = tell("evaluate", str(asked), "--tasks", "mine.jsonl")
    assert (told.code, told.out, told.new) == (2, "", [])
    assert told.err.splitlines() == [
        "swift: mine.jsonl, line 2, answer = 2: must be the number of a choice, from 0 to 1",
        'swift: mine.jsonl, line 4, stop = "": must be a text or a list of texts, none of them empty',
        "swift: --tasks = 'mine.jsonl': has 2 lines that are wrong",
    ]


def test_mistakes(asked, refusal):
    fine = ("evaluate", str(asked), "--tasks", "mine.jsonl")
    assert refusal(*fine[:3], "none.jsonl") == "--tasks = 'none.jsonl': cannot be read: No such file or directory"
    assert refusal(*fine, "--step", "3") == "--step = 3: must be one of 2, 4, which have a checkpoint"
    assert refusal(*fine, "--out", "none/all.json") == "--out = 'none/all.json': cannot be written"
    assert "DIR = 'corpus'" in refusal("evaluate", "corpus", "--tasks", "mine.jsonl")
    assert "--step = 2: is for a run, and corpus is none" in refusal("evaluate", "corpus", *fine[2:], "--step", "2")
    Path("mine.jsonl").write_text(json.dumps(LINES[1] | {"choices": ["a", "b" * 17]}) + "\n")
    assert refusal(*fine) == (
        "mine.jsonl, line 1, choices = 'bbbbbbbbbbbbbbbbb': must be of 1 to 16 tokens, by the tokenizer and the "
        "positions of the model"
    )
