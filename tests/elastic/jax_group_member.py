"""A process for tests/elastic/test_jax_group.py: follows the generations that it reads from its standard input."""

import json
import os
import sys
import threading
import time
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.elastic.jax_group import JaxGroup, is_aborted


def send(**what):
    print(json.dumps(what), flush=True)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    orders, links = SimpleQueue(), []

    def listen():
        for line in sys.stdin:
            orders.put(json.loads(line))
            while not orders.empty():  # what the main thread waits in may have just begun
                for link in links:
                    link.abort()
                time.sleep(0.05)
        orders.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while (order := orders.get()) is not None:
        for link in links:
            link.leave()
        links[:] = [JaxGroup(order["address"], order["index"], order["count"])]
        dies = order.get("dies")
        if dies == "connected":
            links[0]._client.connect()
        if dies in ("before it connects", "connected"):
            os._exit(9)
        run(order, links[0], orders)
    for link in links:
        link.leave()


def run(order, link, orders):
    """Sums over all members until the next order, or until something fails."""
    try:
        link.join()
        if order.get("dies") == "joined":
            os._exit(9)
        if order.get("dies") == "published":
            threading.Thread(target=die_once_published, args=(link._client, order["index"]), daemon=True).start()
        add_up(order, link, orders)
    except Exception as error:
        if not is_aborted(error):
            raise
        send(generation=order["generation"], broken=True, reason=str(error))


def die_once_published(client, index):
    """Ends the process once the others can know where it listens for them, most often before they have connected."""
    while not any(key.endswith(f"/{index}") for key, _ in client.key_value_dir_get_bytes("cpu:gloo")):
        pass
    os._exit(9)


def add_up(order, link, orders):
    mesh = Mesh(link.grid(1)[:, 0], ("worker",))
    sharding = NamedSharding(mesh, PartitionSpec("worker"))
    mine = jax.device_put(jnp.full((1,), 1.0 + order["index"]), jax.local_devices()[0])
    array = jax.make_array_from_single_device_arrays((order["count"],), sharding, [mine])
    step = jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "worker"), mesh=mesh, in_specs=sharding.spec, out_specs=PartitionSpec())
    )
    ids = [device.id for device in mesh.devices.flat]
    for number in range(10**9):
        if number == 1:
            send(generation=order["generation"], going_on=True)
        total = float(np.asarray(step(array).addressable_shards[0].data)[0])
        if number == 0:
            send(generation=order["generation"], total=total, ids=ids)
        if order.get("stays_away"):
            send(generation=order["generation"], away=True)
            time.sleep(1000)
        if not orders.empty():
            return


if __name__ == "__main__":
    main()
