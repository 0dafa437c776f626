"""Task files: what a line may hold, and one sentence for each that is wrong."""

import json
import subprocess
import sys

import pytest

from swift.errors import SettingError
from swift.evaluate.tasks import Completion, Question, Selection, is_match, read_tasks


@pytest.fixture
def written(tmp_path):
    """Writes a task file of objects or bytes."""

    def write(*lines):
        path = tmp_path / "mine.jsonl"
        path.write_bytes(
            b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
        )
        return path

    return write


def test_questions_share_the_settings_of_their_task(written):
    path = written(
        {"task": "sums", "prefix": "1+1=2\n", "stop": "\n", "max_tokens": 4},
        {"task": "sums", "prompt": "2+2=", "answer": "4", "id": "a"},
        b"",
        {"task": "sums", "prompt": "2+3=", "answer": ["5", "five"], "max_tokens": 8, "prefix": ""},
        {"prompt": "Is it?", "choices": [" yes", " no"], "answer": 1},
    )
    tasks, mistakes = read_tasks(path)
    assert (tasks.name, mistakes) == ("mine", [])
    assert tasks.questions == (
        Question(2, "sums", "1+1=2\n2+2=", Completion(("4",), stop=("\n",), max_tokens=4), "a"),
        Question(4, "sums", "2+3=", Completion(("5", "five"), stop=("\n",), max_tokens=8)),
        Question(5, "mine", "Is it?", Selection((" yes", " no"), 1)),
    )
    assert tasks.questions[0].metrics == ("match",)
    assert tasks.questions[2].metrics == ("accuracy", "accuracy_per_byte")


FINE = {"prompt": "Is it?", "choices": [" yes", " no"], "answer": 1}
MISTAKES = {
    "no JSON": (b"{", ' = "{": must be a JSON object in UTF-8'),
    "no UTF-8": (b'{"prompt": "\xff"}', "must be a JSON object in UTF-8"),
    "deep": (b"[" * 100_000, "must be a JSON object in UTF-8"),
    "a list": ([1], " = [1]: must be a JSON object, such as"),
    "twice": (b'{"prompt": "a", "prompt": "b"}', ', prompt = "b": must be given once'),
    "unknown": (FINE | {"subject": "x"}, ', subject = "x": is not a field: a line has task, id, prefix, prompt,'),
    "task": (FINE | {"task": ""}, ', task = "": must be a text that is not empty'),
    "id": (FINE | {"id": 1.5}, ", id = 1.5: must be a text or a whole number"),
    "prompt": (FINE | {"prompt": None}, ", prompt = null: must be a text"),
    "surrogate": (FINE | {"prompt": "\ud800"}, ', prompt = "\\ud800": must be a text'),
    "no prompt": ({"answer": "4"}, ", prompt = (not given): must be given with answer"),
    "one choice": (FINE | {"choices": ["a"]}, ', choices = ["a"]: must be a list of at least two texts'),
    "empty choice": (FINE | {"choices": ["a", " "]}, "each with more than white space"),
    "same choices": (FINE | {"choices": ["a", "b", "a"]}, ', choices = "a": must be different texts'),
    "beyond": (FINE | {"answer": 2}, ", answer = 2: must be the number of a choice, from 0 to 1"),
    "a truth": (FINE | {"answer": True}, ", answer = true: must be the number of a choice, from 0, or"),
    "a word": (FINE | {"answer": "no"}, ', answer = "no": must be the number of a choice, from 0 to 1'),
    "none right": ({"prompt": "a", "choices": ["b", "c"]}, ", answer = (not given): must be the number of a choice"),
    "stop of choices": (FINE | {"stop": "."}, ', stop = ".": cannot be combined with choices'),
    "nothing right": ({"prompt": "a"}, ", answer = (not given): must be given, or a pattern"),
    "both": ({"prompt": "a", "answer": "b", "pattern": "c"}, ', pattern = "c": cannot be combined with an answer'),
    "a number": ({"prompt": "a", "answer": 4}, ", answer = 4: must be a text or a list of texts"),
    "regex": ({"prompt": "a", "pattern": "("}, ', pattern = "(": must be a regular expression of Python: missing )'),
    "extract": ({"prompt": "a", "pattern": "b", "extract": "c"}, ', extract = "c": needs an answer'),
    "stop": ({"prompt": "a", "answer": "b", "stop": [""]}, ', stop = [""]: must be a text or a list of texts'),
    "tokens": (
        {"prompt": "a", "answer": "b", "max_tokens": 0},
        ", max_tokens = 0: must be a whole number from 1 to 1,000,000",
    ),
    "endless": (
        {"prompt": "a", "answer": "b", "max_tokens": 10**30},
        "0: must be a whole number from 1 to 1,000,000",
    ),
    "case": ({"prompt": "a", "answer": "b", "ignore_case": 1}, ", ignore_case = 1: must be true or false"),
    "long": (FINE | {"task": 60 * [1]}, "1, 1, 1,...: must be a text"),
    "mixed": ({"prompt": "a", "answer": "b"}, ", choices = (not given): must be given for all questions of a task or"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_line_is_named(written, name):
    """With its file, its line, its field, and what is allowed; the other lines are read."""
    line, sentence = MISTAKES[name]
    path = written(FINE, line, FINE)
    tasks, (mistake,) = read_tasks(path)
    assert str(mistake).startswith(f"{path}, line 2")
    assert sentence in str(mistake)
    assert "\n" not in str(mistake)
    assert len(str(mistake)) < len(str(path)) + 250
    assert [question.line for question in tasks.questions] == [1, 3]


def test_every_wrong_line_has_a_sentence(written):
    lines = [line for line, _ in MISTAKES.values()]
    _, mistakes = read_tasks(written(FINE, *lines))
    assert [int(mistake.setting.split("line ")[1].split(",")[0]) for mistake in mistakes] == [*range(2, len(lines) + 2)]


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"task": "a", "stop": "."}'], ids=["empty", "blank", "settings"])
def test_a_file_without_a_question(written, content):
    with pytest.raises(SettingError, match=r"--tasks = .*: must have at least one line with a prompt"):
        read_tasks(written(content))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match=r"--tasks = .*: cannot be read: No such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(SettingError, match=r"--tasks = .*: cannot be read: Is a directory"):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("right", "text", "expected"),
    [
        (Completion(("Paris",)), " Paris\n", True),
        (Completion(("Paris",)), "paris", False),
        (Completion(("PARIS",), ignore_case=True), "paris", True),
        (Completion(("Paris",)), "Paris is", False),
        (Completion(("18",), extract=r"#### (-?\d+)"), "9+9\n#### 18 or #### 19", True),
        (Completion(("18",), extract=r"#### (-?\d+)"), "18", False),
        (Completion(("18",), extract=r"\d+"), "it is 18.", True),
        (Completion(("",), extract=r"x(y)?"), "x", True),
        (Completion(pattern=r"\b4\b"), "so 4.", True),
        (Completion(pattern=r"YES", ignore_case=True), "yes", True),
        (Completion(pattern=r"^\d+$"), "so 4", False),
    ],
)
def test_matches(right, text, expected):
    assert is_match(right, text) is expected


def test_tasks_and_results_do_without_jax():
    """Reports read them; only asking the questions takes an engine."""
    code = "import sys, swift.evaluate.tasks, swift.evaluate.results; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_files_with_byte_order_marks_can_be_joined(tmp_path):
    mark, line = b"\xef\xbb\xbf", b'{"prompt": "a", "answer": "b"}\r\n'
    (tmp_path / "tasks.jsonl").write_bytes(mark + line + mark + b"\r\n" + mark + line + mark)
    tasks, mistakes = read_tasks(tmp_path / "tasks.jsonl")
    assert (len(tasks.questions), mistakes) == (2, [])
