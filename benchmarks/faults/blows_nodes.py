"""Faults between machines: links that are cut, slow or lossy, and machines that are lost."""

import signal
from random import Random

from .kinds import Aftermath, Draw, Kind, Parameters
from .processes import send
from .running import Run
from .wire import State


def _lose_sight(run: Run, after: Aftermath) -> None:
    """Notes that the members of the second machine may be lost."""
    after.out_of_reach.update(run.shape.members_of_node(1))


def _disturb(run: Run, parameters: Parameters, after: Aftermath) -> None:
    network = run.network
    assert network is not None
    network.say(State(parameters["delay_s"], tuple(parameters["cut"]), parameters["lost"]))
    if parameters["cut"]:
        _lose_sight(run, after)
    after.heal_after(parameters["seconds"], lambda: network.say(State()))


def _draw_cut(rng: Random, _: Run) -> Parameters:
    cut = rng.choice([[0, 1], [0, 1], [0], [1]])
    return {"delay_s": 0.0, "cut": cut, "lost": 0.0, "seconds": round(rng.uniform(0.3, 15.0), 2)}


def _draw_slow(rng: Random, _: Run) -> Parameters:
    delay_s, lost = rng.choice([(0.002, 0.0), (0.02, 0.0), (0.2, 0.0), (0.0, 0.05), (0.01, 0.3)])
    return {"delay_s": delay_s, "cut": [], "lost": lost, "seconds": round(rng.uniform(1.0, 8.0), 2)}


def _kill_node(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Kills what the user started on the second machine, and starts it again."""
    node = run.life.nodes[1]
    send([node.pid], signal.SIGKILL)
    node.wait()
    _lose_sight(run, after)
    after.heal_after(parameters["seconds"], run.start_missing_nodes)


def _pause_node(run: Run, parameters: Parameters, after: Aftermath) -> None:
    pid = run.life.nodes[1].pid
    send([pid], signal.SIGSTOP)
    _lose_sight(run, after)
    after.heal_after(parameters["seconds"], lambda: send([pid], signal.SIGCONT))


def _seconds(low: float, high: float) -> Draw:
    return lambda rng, _: {"seconds": round(rng.uniform(low, high), 2)}


def _has_network(run: Run) -> bool:
    return run.network is not None


def _has_nodes(run: Run) -> bool:
    return run.shape.num_nodes > 1


KINDS = [
    Kind("cut-wire", _disturb, _draw_cut, _has_network, group="wire", regroups=True),
    Kind("slow-wire", _disturb, _draw_slow, _has_network, group="wire"),
    Kind("kill-node", _kill_node, _seconds(0.2, 3.0), _has_nodes, group="node", regroups=True),
    Kind("pause-node", _pause_node, _seconds(0.5, 12.0), _has_nodes, group="node"),
]
