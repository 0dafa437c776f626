"""The manifests of docs/clusters.md, held against the fields of JobSet."""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FIELDS = json.loads(Path(__file__).with_name("jobset-0.12.json").read_text())
"""Names and types of fields in the custom resource definition of JobSet 0.12, v1alpha2; empty where none is in use."""
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "int-or-string": (int, str)}


def manifests():
    text = (ROOT / "docs" / "clusters.md").read_text()
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", text, re.MULTILINE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in blocks if "kind: JobSet" in block]


def flaws(value, schema, path=""):
    """What of a value its schema does not allow."""
    if not schema:
        yield f"{path}: its fields are not in the copy of the schema"
        return
    if not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        yield f"{path}: {value!r} is not of type {schema['type']}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, list):
        for item in value:
            yield from flaws(item, schema["items"], f"{path}[]")
    elif isinstance(value, dict):
        yield from (f"{path}.{name}: is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if known is None:
                yield f"{path}.{name}: there is no such field"
            else:
                yield from flaws(item, known, f"{path}.{name}")


def job_of(manifest):
    (job,) = manifest["spec"]["replicatedJobs"]
    return job


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: job_of(manifest)["name"])
def test_a_manifest_has_jobsets_fields(manifest):
    assert list(flaws(manifest, FIELDS)) == []
    spec = job_of(manifest)["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_the_pods_of_train_ask_for_the_first_one_by_the_name_that_jobset_gives_it():
    assert len(manifests()) == 2
    train = manifests()[1]
    job = job_of(train)
    name, spec = train["metadata"]["name"], job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (text,) = container["args"]
    host = f"{name}-{job['name']}-0-0.{name}"
    assert f"until getent hosts {host};" in text
    assert f"--coordinator {host}:9123 --num-hosts {spec['completions']} " in text
    assert spec["completions"] == spec["parallelism"]


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: job_of(manifest)["name"])
def test_a_run_without_a_checkpoint_is_moved_and_never_removed(manifest, tmp_path):
    (container,) = job_of(manifest)["template"]["spec"]["template"]["spec"]["containers"]
    (text,) = container["args"]
    script = re.sub(r"until getent .*", "", text).replace("exec python", "echo").replace("/runs", str(tmp_path))
    environment = {"JOB_COMPLETION_INDEX": "0", "PATH": os.environ["PATH"]}

    def begins():
        told = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert told.stderr == ""
        return "--resume" not in told.stdout

    assert begins()
    run = tmp_path / "mine"
    (run / "checkpoints" / "step-00000003.aside").mkdir(parents=True)
    (run / "checkpoints" / "step-00000003.aside" / "manifest.json").touch()  # what a resumed run put aside
    assert begins()
    assert not run.exists()
    (moved,) = tmp_path.glob("mine.broken-*/checkpoints/step-00000003.aside/manifest.json")
    moved.parent.parent.parent.rename(run)
    (run / "checkpoints" / "step-00000004").mkdir()
    (run / "checkpoints" / "step-00000004" / "manifest.json").touch()
    assert not begins()
    assert run.exists()


def test_flaws_are_found():
    spec = {"replicatedJobs": [{"name": 3, "replica": 1}], "network": {"enableDNSHostnames": "yes"}}
    assert list(flaws({"spec": spec | {"suspend": True}, "kinds": "JobSet"}, FIELDS)) == [
        ".spec.replicatedJobs[].template: is missing",
        ".spec.replicatedJobs[].name: 3 is not of type string",
        ".spec.replicatedJobs[].replica: there is no such field",
        ".spec.network.enableDNSHostnames: 'yes' is not of type boolean",
        ".spec.suspend: its fields are not in the copy of the schema",
        ".kinds: there is no such field",
    ]
