"""Given the profiles that cedar has published, the optimizer chooses plans that cost at most what cedar's own do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swift.data.operators import Map
from swift.data.pipeline import CachePoint, InputPlan, Pipeline, plain_plan
from swift.data.records import Rows
from swift.input.optimizer import Resources, legal_orders, plan_input, predict
from swift.input.profile import InputProfile, OperatorProfile

PIPELINES = json.loads(Path(__file__).with_name("cedar_profiles.json").read_text())["pipelines"]
PLANS = [(name, plan) for name, found in PIPELINES.items() for plan in found["published"]]
NUM_EPOCHS = 100.0
"""So many that what happens once hardly counts: cedar's figures are of an epoch with a cache that is full."""


def seconds_of(found: dict) -> dict[str, float]:
    """Seconds of one call, as cedar weighs them: the latencies' shares of the time in which a sample is made."""
    total = sum(row[1] for row in found["operators"])
    return {row[0]: row[1] / total / found["samples_per_s"] for row in found["operators"]}


def cost(found: dict, order: list[str]) -> float:
    """Seconds of a sample in an epoch by cedar's rule: time grows with the bytes that come in, and a cache is read."""
    rows, seconds = {row[0]: row for row in found["operators"]}, seconds_of(found)
    source = found["operators"][0]
    size, total = source[3], seconds[source[0]]
    for name in order:
        if name == "cache":
            total = size * found["disk_s_per_byte"][1]
            continue
        total += seconds[name] * size / rows[name][2]
        size *= rows[name][3] / rows[name][2]
    return total


def profiled(found: dict) -> tuple[Pipeline, InputProfile]:
    """The pipeline with the profile that cedar measured, in this library's terms."""
    seconds, (source, *rows) = seconds_of(found), found["operators"]
    elements = [
        Map(dict, depends_on=tuple(before), is_random=kind == "random", is_fixed=kind == "fixed", name=name)
        for name, _, _, _, kind, before in rows
    ]
    means = [
        OperatorProfile(name, seconds[name], seconds[name], taken, made, writes_ratio=made / taken)
        for name, _, taken, made, _, _ in rows
    ]
    reads = OperatorProfile(source[0], seconds[source[0]], seconds[source[0]], 0.0, source[3])
    profile = InputProfile(100, found["records"], reads, tuple(means), keep_s=tuple(found["disk_s_per_byte"]))
    return Pipeline(Rows([{"path": ""}]), tuple(elements)), profile


def planned(pipeline: Pipeline, order: list[str]) -> InputPlan:
    """A published plan in this library's terms."""
    plan = replace(plain_plan(pipeline), orders=(tuple(name for name in order if name != "cache"),))
    return replace(plan, cache=CachePoint(order.index("cache"), "disk")) if "cache" in order else plan


def order_of(plan: InputPlan) -> list[str]:
    """The operators of a plan, with its cache."""
    order = list(plan.orders[0])
    if plan.cache is not None:
        order.insert(plan.cache.num_elements, "cache")
    return order


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_the_chosen_plan_costs_at_most_what_the_published_one_does(name, plan, tmp_path):
    found = PIPELINES[name]
    pipeline, profile = profiled(found)
    published = found["published"][plan]
    where = tmp_path if "cache" in published else None
    chosen = plan_input(pipeline, Resources(NUM_EPOCHS, memory_bytes=0, cache_directory=where), profile)
    theirs = planned(pipeline, published)
    assert predict(chosen, profile).total_s(NUM_EPOCHS) <= predict(theirs, profile).total_s(NUM_EPOCHS) * (1 + 1e-9)
    assert cost(found, order_of(chosen)) <= cost(found, published) * (1 + 1e-9)
    orders = {tuple(one.name for one in order) for order in legal_orders(pipeline.levels[0].elements, 10_000)}
    assert {chosen.orders[0], theirs.orders[0]} <= orders
    assert (chosen.cache is None) == (where is None)


@pytest.mark.parametrize("name", PIPELINES)
def test_an_order_is_predicted_to_cost_what_cedars_rule_says(name):
    found = PIPELINES[name]
    pipeline, profile = profiled(found)
    for order in list(legal_orders(pipeline.levels[0].elements, 300))[::7]:
        names = [one.name for one in order]
        epoch_s = predict(planned(pipeline, names), profile).epoch_s
        assert epoch_s == pytest.approx(found["records"] * cost(found, names), rel=1e-9)
