"""Results as files: what is written is read, and what is damaged is refused in a line."""

import json

import pytest

from swift.errors import SettingError
from swift.evaluate.results import Evaluation, Judgement, differences, document_of, read_evaluations, write_evaluations


def evaluation(model, right, **changed):
    judgements = [
        Judgement(
            line, "facts", {"accuracy": is_right, "accuracy_per_byte": not is_right}, (-1.5, -2.0), name=f"q{line}"
        )
        for line, is_right in enumerate(right, start=1)
    ]
    judgements.append(Judgement(90, "sums", {"match": True}, None, "4", unseen_tokens=3))
    facts = {"path": f"/{model}", "step": 20, "weights": "aa", "tasks": "mine", "tasks_digest": "bb"}
    facts |= {"num_questions": len(judgements), "seconds": 1.5} | changed
    return Evaluation(model, judgements=tuple(judgements), **facts)


ONE, OTHER = evaluation("one", [True, True, True, False]), evaluation("other", [True, False, False, True], step=None)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "evaluations" / "mine.json"
    write_evaluations(path, [ONE, OTHER])
    assert read_evaluations(path) == [ONE, OTHER]
    assert [path] == list(path.parent.iterdir())


def test_scores_and_differences_are_counted():
    document = document_of([ONE, OTHER])
    first, second = document["models"]
    assert [(score["task"], score["metric"], score["share"], score["questions"]) for score in first["scores"]] == [
        ("facts", "accuracy", 0.75, 4),
        ("facts", "accuracy_per_byte", 0.25, 4),
        ("sums", "match", 1.0, 1),
    ]
    assert (first["complete"], first["cut"], second["step"]) == (True, 1, None)
    found = document["differences"][0]
    assert (found["model"], found["less"], found["task"], found["difference"]) == ("other", "one", "facts", -0.25)
    assert [found[name] for name in ("both", "only_model", "only_less", "neither")] == [1, 1, 2, 0]
    assert document_of([ONE], with_answers=False)["models"][0].get("judgements") is None


def test_a_difference_is_of_the_questions_that_both_have_answered():
    part = evaluation("part", [True, False], num_questions=5)
    assert not part.is_complete
    assert [(found.metric, found.questions, found.share) for found in differences(ONE, part)] == [
        ("accuracy", 2, 0.5),
        ("accuracy_per_byte", 2, -0.5),
        ("match", 1, 0.0),
    ]


def damaged(path, damage):
    document = json.loads(path.read_text())
    damage(document["models"][0])
    path.write_text(json.dumps(document))


DAMAGES = {
    "judgement": lambda model: model["judgements"].append(3),
    "correct": lambda model: model["judgements"][0].update(correct={"accuracy": 1, "accuracy_per_byte": True}),
    "metric": lambda model: model["judgements"][0].update(correct={"fame": True}),
    "metrics of a task": lambda model: model["judgements"][0].update(correct={"match": True}),
    "log_probs": lambda model: model["judgements"][0].update(log_probs=[float("nan")]),
    "twice": lambda model: model["judgements"].append(model["judgements"][0]),
    "count": lambda model: model.update(num_questions=1),
    "step": lambda model: model.update(step="20"),
    "missing": lambda model: model.pop("weights"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(tmp_path, name):
    path = tmp_path / "evaluations" / "mine.json"
    write_evaluations(path, [ONE])
    damaged(path, DAMAGES[name])
    with pytest.raises(SettingError, match=r"mine\.json'?: are damaged: write them again"):
        read_evaluations(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"models": []}', '{"format": 1, "models": 3}'])
def test_what_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(SettingError, match="are damaged"):
        read_evaluations(path)


def test_a_later_format_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"format": 2, "models": []}')
    with pytest.raises(SettingError, match="are of format 2: only 1 is known"):
        read_evaluations(path)
