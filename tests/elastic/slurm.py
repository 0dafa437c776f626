"""A Slurm of three nodes on one machine, for tests: its daemons, and how one of its nodes is lost and found again."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

NODES = ("node0", "node1", "node2")


def can_run():
    """Whether there is a Slurm here, and root may give its nodes names."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "unshare"))):
        return False
    probe = ["unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


_CONFIG = """
ClusterName=swift
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={top}/state
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd.%n.pid
SlurmdSpoolDir={top}/spool.%n
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=0
SlurmdTimeout=60
KillWait=120
NodeName=node[0-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """The daemons of a controller and three nodes, whose files are in one directory; they end with the context.

    Its nodes have no names that could be looked up, as a cluster's have: ``named`` gives them some.
    """

    def __init__(self, top):
        self.top, self._daemons = top, {}
        self.environment = os.environ | {"SLURM_CONF": str(top / "slurm.conf")}

    def __enter__(self):
        (self.top / "state").mkdir(parents=True)
        port, *others = _free_ports(1 + len(NODES))
        config = _CONFIG.format(top=self.top, port=port, node_ports=",".join(map(str, others)))
        (self.top / "slurm.conf").write_text(config)
        hosts = Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n"
        (self.top / "hosts").write_text(hosts)
        try:
            self._start("controller", "slurmctld", "-D", "-c")
            for node in NODES:
                (self.top / f"spool.{node}").mkdir()
                self.start(node)
            self.wait_until(lambda: self.ask("sinfo", "--noheader", "--states=idle", "--format=%D") == "3")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._kill_all()
        for daemon in self._daemons.values():
            daemon.wait()

    def start(self, node):
        """Starts the daemon of a node, whose name all processes that come from it have in their environments."""
        self._start(node, "slurmd", "-D", "-N", node, SLURMD_NODENAME=node)

    def lose(self, node):
        """Ends all processes of a node at once, as a loss of power would, and tells Slurm what it would find out."""
        self._kill_all(node)
        self._daemons.pop(node).wait()
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def kill_task(self, node):
        """Ends what a task of a job started on a node, but not Slurm's own processes."""
        for pid in self._processes(node):
            with suppress(OSError):
                if not Path(f"/proc/{pid}/comm").read_text().startswith("slurm"):
                    os.kill(pid, signal.SIGKILL)

    def find(self, node):
        """Has a node back that was lost and given up."""
        self.start(node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def ask(self, *words, **variables):
        """Output of one of Slurm's commands, in the directory and with the environment of whoever types it."""
        environment, cwd = self.environment | variables, self.top.parent
        done = subprocess.run(words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (words, done.stderr, self.logs())
        return done.stdout.strip()

    def submit(self, script, **variables):
        """Submits a batch script; returns the job's number."""
        path = self.top / "job.sh"
        path.write_text(script)
        return self.ask("sbatch", "--parsable", f"--output={self.top}/job-%j.txt", str(path), **variables)

    def said(self, job):
        """Output of a job so far."""
        path = self.top / f"job-{job}.txt"
        return path.read_text() if path.exists() else ""

    def state(self, job):
        """State of a job, such as RUNNING or COMPLETED."""
        fields = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)["JobState"]

    def named(self, command):
        """A command that looks its nodes' names up in a file of hosts that has them."""
        inside = f'mount --bind {self.top}/hosts /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", inside, "sh", *command]

    def wait_until(self, holds, patience_s=240):
        """Waits until something holds."""
        until = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.2)

    def logs(self):
        """Ends of what the daemons and jobs wrote."""
        paths = [*self.top.glob("*.log"), *self.top.glob("*.txt")]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in paths)

    def _start(self, name, *words, **variables):
        with open(self.top / f"{name}.log", "ab") as log:
            pipes = {"stdout": log, "stderr": log}
            self._daemons[name] = subprocess.Popen(words, env=self.environment | variables, **pipes)

    def _processes(self, node=None):
        """Process ids of a node, or of all; those that have ended and are not waited for have no environment."""
        marks = {f"SLURM_CONF={self.top}/slurm.conf"} | ({f"SLURMD_NODENAME={node}"} if node else set())
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marks <= set((path / "environ").read_text(errors="replace").split("\0")):
                    yield int(path.name)

    def _kill_all(self, node=None):
        until = time.monotonic() + 20
        while pids := list(self._processes(node)):  # what starts meanwhile is found the next time
            assert time.monotonic() < until, pids
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
