"""``swift checkpoint``: what is there, what a restore would do, and what is damaged; nothing is changed by asking."""

import json
import shutil

import pytest

from swift.cli.main import main

PARTIAL = ["--set", "CheckpointConfig.experts_per_layer=1", "--set", "CheckpointConfig.num_kept=3"]


@pytest.fixture(scope="session")
def partial_run(home):
    """A run of tiny.gin with K = 1, stopped at iteration 5 of 6, with checkpoints of 2, 4 and (full) 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "tiny.gin", *PARTIAL, "--run-dir", "partial", "--stop-at", "5"]) == 0
    return home / "partial"


@pytest.fixture(autouse=True)
def partial(partial_run, here):
    """A copy of it, which was lost after iteration 4."""
    (here / "partial").unlink(missing_ok=True)
    copy = shutil.copytree(partial_run, here / "partial")
    shutil.rmtree(copy / "checkpoints/step-00000005")
    return copy


def damage(partial, name):
    file = partial / "checkpoints" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_list_shows_what_can_be_restored(tell):
    for where in ("partial", "partial/checkpoints"):
        told = tell("checkpoint", "list", where, "--format", "json")
        assert (told.code, told.err, told.new) == (0, "", [])
        rows = json.loads(told.out)["checkpoints"]
        assert [(row["step"], row["is_full"], row["oldest_expert"]) for row in rows] == [(2, True, 2), (4, False, 2)]
        assert rows[0]["bytes"] > rows[1]["bytes"] > 0
    text = tell("checkpoint", "list", "partial").out
    assert "experts per layer" in text
    assert "all" in text


def test_inspect_shows_where_every_expert_lies_and_what_a_restore_would_do(tell):
    said = json.loads(tell("checkpoint", "inspect", "partial", "--format", "json").out)
    assert said["checkpoint"]["step"] == 4
    of_experts = said["experts"]
    assert [(one["layer"], one["class"], one["step"], one["age"]) for one in of_experts] == [
        (0, class_, 4 if class_ == 0 else 2, 0 if class_ == 0 else 2) for class_ in range(4)
    ]
    assert [one["fallback"] for one in of_experts] == [2, None, None, None]
    assert all(len(one["hash"]) == 32 and one["bytes"] > 0 and one["files"] for one in of_experts)
    assert said["restore"]["experts"] == {"4": [[0, 0]], "2": [[0, 1], [0, 2], [0, 3]]}
    told = tell("checkpoint", "inspect", "partial")
    assert (told.code, told.new) == (0, [])
    assert "  dense: storage, step 4\n" in told.out
    assert "  experts 1, 2, 3 of layer 0: storage, step 2\n" in told.out
    older = json.loads(tell("checkpoint", "inspect", "partial", "--step", "2", "--format", "json").out)
    assert older["checkpoint"]["is_full"]


def test_verify_finds_what_is_damaged_and_says_what_a_restore_would_fall_back_to(tell, partial):
    told = tell("checkpoint", "verify", "partial")
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("all files and values are as they were saved\n")
    name = "step-00000004/arrays/state/expert.0.0.float32/0.0.0"
    damage(partial, name)
    told = tell("checkpoint", "verify", "partial")
    assert (told.code, told.new) == (3, [])
    reason = "step-00000004 is damaged: its file arrays/state/expert.0.0.float32/0.0.0 is not as it was saved"
    assert told.out.splitlines() == [
        f"damaged: {reason}",
        "a restore takes",
        "  dense: storage, step 4",
        "  all experts: storage, step 2",
        f"  passed over: expert 0 of layer 0: {reason}",
        told.out.splitlines()[-1],
    ]
    assert told.err == "swift: partial: 1 of its files or arrays damaged or missing\n"
    said = tell("checkpoint", "verify", "partial", "--format", "json")
    assert (said.code, json.loads(said.out)["damaged"]) == (3, [reason])


def test_verify_of_one_checkpoint_is_of_what_that_one_reads(tell, partial):
    damage(partial, "step-00000004/arrays/state/expert.0.0.float32/0.0.0")
    sound, damaged = (f"partial/checkpoints/step-0000000{step}" for step in (2, 4))
    told = tell("checkpoint", "verify", sound)
    assert (told.code, told.err) == (0, "")
    assert "  dense: storage, step 2\n" in told.out
    assert (
        tell("checkpoint", "verify", damaged).err == f"swift: {damaged}: 1 of its files or arrays damaged or missing\n"
    )


def test_a_damaged_manifest_is_told_by_all(tell, partial):
    damage(partial, "step-00000004/manifest.json")
    assert "is damaged: its file manifest.json" in tell("checkpoint", "list", "partial").out
    assert tell("checkpoint", "verify", "partial").code == 3


LOST = "step-00000004 holds no checkpoint: there is no manifest.json in it"


def test_a_newer_checkpoint_without_its_manifest_is_named_by_who_takes_an_older_one(tell, refusal, partial, here):
    (partial / "checkpoints/step-00000004/manifest.json").unlink()
    (here / "mine.jsonl").write_text('{"task": "picked", "prompt": "al", "choices": ["beta", "gamma"], "answer": 1}\n')
    for command in ("export partial --out model", "evaluate partial --tasks mine.jsonl"):
        told = tell(*command.split())
        assert told.code == 0, told.err
        assert f"passed over: {LOST}" in told.err.splitlines()
    assert LOST.partition(" ")[2] in refusal(*["export", "partial", "--out", "another", "--step", "4"])


def test_a_run_whose_checkpoints_have_all_lost_their_manifests_has_some(refusal, partial, here):
    """Nobody is told to remove it or to start again: the manifests may be found."""
    for step in (2, 4):
        (partial / f"checkpoints/step-0000000{step}/manifest.json").unlink()
    (here / "both").mkdir()
    partial.rename(here / "both/tiny")
    (here / "other.gin").write_text("include 'tiny.gin'\n")
    settings = " ".join(PARTIAL)
    for command in (
        "export both/tiny --out model",
        f"compare tiny.gin other.gin {settings} --run-dir both --resume",
        f"train tiny.gin {settings} --run-dir both/tiny --resume",
    ):
        line = refusal(*command.split())
        assert f"cannot be restored: {LOST}; step-00000002 holds no checkpoint" in line, command


@pytest.mark.parametrize("action", ["list", "inspect", "verify"])
@pytest.mark.parametrize("where", ["nowhere", "corpus", "tiny.gin", "."])
def test_what_is_no_checkpoint_is_refused_in_a_line(refusal, action, where):
    assert refusal("checkpoint", action, where) == f"DIR = '{where}': holds no checkpoint"


def test_a_step_that_is_not_there_is_refused(refusal):
    line = refusal("checkpoint", "inspect", "partial", "--step", "3")
    assert line == "--step = 3: must be one of 2, 4, which have a checkpoint"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("CheckpointConfig.experts_per_layer=0", "must be a whole number of at least 1, or 'all'"),
        ("CheckpointConfig.experts_per_layer=5", "must be at most ExpertConfig.num_classes = 4; 'all' for full"),
        ("CheckpointConfig.selection=random", "must be one of sequential, load_aware"),
        ("CheckpointConfig.evry=3", "did you mean every?"),
        ("Experiment.checkpoint_every=3", "Experiment has no such setting"),
    ],
)
def test_bad_settings_are_refused_in_a_line(refusal, setting, line):
    assert line in refusal("train", "tiny.gin", "--set", setting)


def test_a_run_goes_on_from_it_and_says_where_everything_came_from(tell):
    told = tell("train", "tiny.gin", *PARTIAL, "--run-dir", "partial", "--resume")
    assert told.code == 0, told.err
    assert "expert 0 of layer 0: storage, step 4\n" in told.err
    assert "experts 1, 2, 3 of layer 0: storage, step 2\n" in told.err
    assert "proportion of lost tokens so far: 0." in told.err
    assert tell("export", "partial", "--out", "model", "--step", "4").out.startswith(
        "model: the model of iteration 4, some experts of iteration 2; try"
    )
