"""Proportion of lost tokens against a count that keeps, for every expert, the list of updates that it has seen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.checkpoint.manifest import Copy, Ledger
from swift.checkpoint.selection import TokenUpdateCounter, dynamic_k, next_rotation, sequential

LAYERS, CLASSES = 4, 4


class Lists:
    """An independent count: every expert is the list of its iterations, one entry for each update."""

    def __init__(self):
        self.live = {(layer, class_): [] for layer in range(LAYERS) for class_ in range(CLASSES)}
        self.copies, self.lost, self.routed = {}, [0] * LAYERS, [[] for _ in range(LAYERS)]

    def see(self, step, record):
        for (layer, class_), updates in self.live.items():
            taken = record["popularity"][layer][class_] - record["dropped"][layer][class_]
            updates += [step] * taken
            self.routed[layer] += [step] * record["popularity"][layer][class_]

    def save(self, step, chosen):
        for layer, classes in enumerate(chosen):
            for class_ in classes:
                self.copies.setdefault((layer, class_), []).append((step, list(self.live[layer, class_])))

    def fault(self, step):
        self.routed = [[s for s in routed if s <= step] for routed in self.routed]
        for unit, updates in self.live.items():
            copy = [copy for at, copy in self.copies[unit] if at <= step][-1]
            self.lost[unit[0]] += len([s for s in updates if s <= step]) - len(copy)
            self.live[unit] = list(copy)

    def plt(self):
        return sum(lost / len(routed) for lost, routed in zip(self.lost, self.routed, strict=True)) / LAYERS


@pytest.mark.parametrize("selection", ["sequential", "load_aware"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_lost_tokens_are_those_of_an_independent_count(small_run, selection, k):
    """Faults in a row, right after a save, and none between two saves."""
    run, count = small_run(experts_per_layer=k, selection=selection, every=2), Lists()
    for last in (3, 7, 7, 9, 12, 13):
        seen = run.step
        run.run(last)
        for step in range(seen + 1, last + 1):
            count.see(step, run.records[step - 1])
            if step % 2 == 0:
                count.save(step, run.chosen[step])
        plan = run.lose_all()
        count.fault(plan.step)
        assert plan.tally.plt == pytest.approx(count.plt(), rel=1e-12)
        assert plan.tally.lost_L.tolist() == count.lost
    assert count.plt() > 0.01
    assert run.ledger.tally.num_faults == 6


def test_a_second_fault_before_the_next_save_loses_nothing_more(small_run):
    run = small_run(experts_per_layer=1, every=2).run(5)
    first = run.lose_all().tally
    assert first.plt > 0
    run.run(5)
    assert run.lose_all().tally.lost_L.tolist() == first.lost_L.tolist()


def test_full_checkpoints_lose_nothing(small_run):
    run = small_run(every=2).run(5)
    assert run.lose_all().tally.plt == 0.0


def test_lost_tokens_become_fewer_as_the_run_goes_on():
    ones = np.ones((1, 2), int)
    tally = TokenUpdateCounter.none(1, 2).count(ones, 0 * ones).restored(np.array([[0, 1]]))
    assert tally.plt == 0.5
    assert tally.count(ones, ones).plt == 0.25
    assert tally.count(ones, ones).contained_LE.tolist() == [[0, 1]]


def test_the_tally_comes_back_as_it_was_written():
    tally = TokenUpdateCounter(np.array([[3, 2**40]]), np.array([7]), np.array([1]), 2)
    again = TokenUpdateCounter.from_json(tally.to_json(), 2)
    assert again.to_json() == tally.to_json()
    assert TokenUpdateCounter.from_json(TokenUpdateCounter.none(0, 0).to_json(), 0).plt == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 3))
def test_sequential_saves_every_expert_once_in_a_round(k, num_classes, num_layers):
    k = min(k, num_classes)
    ledger = Ledger.first(num_layers, num_classes, k)
    chosen = [ledger.choose("sequential", full=False)]
    assert chosen[0].shape == (num_layers, num_classes)  # the first one is full
    turn_L, seen = ledger.turn_L, [set() for _ in range(num_layers)]
    for _ in range(-(-num_classes // k)):
        for layer, classes in enumerate(sequential(turn_L, num_classes, k)):
            assert len(set(classes)) == k
            seen[layer] |= set(classes)
        turn_L = next_rotation(turn_L, num_classes, k)
    assert all(len(classes) == num_classes for classes in seen)


def faults_every_50(budget):
    """Lists (PLT, K before, K after) for six faults of a run that is saved every other iteration."""
    random, ledger, history = np.random.default_rng(0), Ledger.first(LAYERS, CLASSES, 1), []
    for step in range(1, 302):
        popularity = random.integers(20, 30, (LAYERS, CLASSES))
        ledger = ledger.counted(popularity, 0 * popularity)
        if step % 2 == 0:
            chosen = ledger.choose("sequential", full=False)
            units = [(layer, class_) for layer, classes in enumerate(chosen.tolist()) for class_ in classes]
            copies = {unit: Copy(step, int(ledger.tally.contained_LE[unit]), 0, "", {}) for unit in units}
            ledger = ledger.saved(step, chosen, copies, {})
        if step % 50 == 0:
            contained = [copies[0].contained for _, copies in sorted(ledger.copies.items())]
            tally = ledger.tally.restored(np.array(contained).reshape(LAYERS, CLASSES))
            after = dynamic_k(ledger.k, tally.plt, budget, CLASSES)
            history.append((tally.plt, ledger.k, after))
            ledger = replace(ledger, tally=tally, k=after)
    return history


def test_dynamic_k_brings_lost_tokens_under_their_budget_and_k_never_falls():
    """K = 1 loses 6 % of all tokens, a round of 4 saves being 8 of every 50 iterations."""
    fixed, dynamic = faults_every_50(None), faults_every_50(0.0375)
    assert all(plt > 0.0375 and k == 1 for plt, _, k in fixed)
    for plt, before, after in dynamic:
        assert after == (min(2 * before, CLASSES) if plt > 0.0375 else before)
    assert [k for _, _, k in dynamic] == [2, 4, 4, 4, 4, 4]
    assert all(plt < 0.0375 for plt, _, _ in dynamic[2:])


def test_k_goes_up_to_all_classes_and_no_further():
    assert [dynamic_k(k, 0.5, 0.1, 6) for k in (1, 3, 4, 6)] == [2, 6, 6, 6]
    assert dynamic_k(2, 0.1, 0.1, 6) == 2
    assert dynamic_k(2, 0.9, None, 6) == 2
