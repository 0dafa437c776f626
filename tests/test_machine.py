"""What the kernel and control groups of either version leave to a process, read from files as Linux writes them."""

import pytest

from swift.machine import memory_rooms, num_memory_kills, size_text

GB = 1_000_000_000
MEMINFO = (
    "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   16000000 kB\nSwapTotal: {swap} kB\n"
)
V1_NONE = "9223372036854771712\n"


def rooms(root, *, swap=0, **files):
    """The rooms on a machine of 24.6 GB, 16.4 of them available, and some files; a double underscore is a slash."""
    for name, text in {"proc__meminfo": MEMINFO.format(swap=swap), **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_rooms(root)


def test_without_control_groups_it_is_what_the_kernel_has(tmp_path):
    assert rooms(tmp_path) == ((16_384_000_000, 24_576_000_000, 0, "this machine"),)
    assert rooms(tmp_path, swap=2_000_000)[0].swap == 2_048_000_000
    assert memory_rooms(tmp_path / "not linux") == ()


@pytest.mark.parametrize("own", ["/", "/user.slice/run.scope", "/on/the/host/only"])
def test_version_2_counts_what_is_used_but_not_the_page_cache(tmp_path, own):
    """In a container without a namespace of its own, the path is that of the host, and not mounted."""
    where = f"sys__fs__cgroup{own.replace('/', '__') if 'slice' in own else '__'}".rstrip("_")
    files = {
        "proc__self__cgroup": f"0::{own}\n",
        f"{where}__memory.max": f"{4 * GB}\n",
        f"{where}__memory.current": f"{3 * GB}\n",
        f"{where}__memory.stat": f"anon {2 * GB}\nfile {GB}\ninactive_file {GB // 2}\nactive_file {GB // 4}\n",
        f"{where}__memory.swap.max": "0\n",
    }
    machine, group = rooms(tmp_path, swap=2_000_000, **files)
    assert (group.left, group.size, group.swap) == (GB + 3 * GB // 4, 4 * GB, 0)
    assert machine.swap == 2_048_000_000


def test_a_group_above_may_be_the_one_that_limits(tmp_path):
    files = {
        "proc__self__cgroup": "0::/pod/container\n",
        "sys__fs__cgroup__pod__container__memory.max": "max\n",
        "sys__fs__cgroup__pod__memory.max": f"{2 * GB}\n",
        "sys__fs__cgroup__pod__memory.current": f"{GB}\n",
    }
    assert [(room.left, room.size) for room in rooms(tmp_path, **files)[1:]] == [(GB, 2 * GB)]


def test_version_1_beside_an_empty_version_2(tmp_path):
    files = {
        "proc__self__cgroup": "4:memory:/job/7\n1:cpu,cpuacct:/\n0::/\n",
        "sys__fs__cgroup__memory__memory.limit_in_bytes": V1_NONE,
        "sys__fs__cgroup__memory__job__7__memory.limit_in_bytes": f"{6 * GB}\n",
        "sys__fs__cgroup__memory__job__7__memory.usage_in_bytes": f"{5 * GB}\n",
        "sys__fs__cgroup__memory__job__7__memory.stat": f"total_inactive_file {GB}\ntotal_active_file 0\ncache 7\n",
        "sys__fs__cgroup__memory__job__7__memory.memsw.limit_in_bytes": f"{7 * GB}\n",
    }
    (_, group) = rooms(tmp_path, swap=9_000_000, **files)
    assert (group.left, group.size, group.swap) == (2 * GB, 6 * GB, GB)


def test_sizes_are_told_in_the_unit_that_fits():
    assert [size_text(size) for size in (16_384_000_000, 64_000_000)] == ["16.4 GB", "64 MB"]


def test_processes_that_the_kernel_has_killed_for_memory_are_counted(tmp_path):
    assert num_memory_kills(tmp_path) == 0
    rooms(
        tmp_path, **{"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__memory.events": "high 0\noom_kill 3\n"}
    )
    assert num_memory_kills(tmp_path) == 3
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    files = {"proc__self__cgroup": "4:memory:/job\n", "sys__fs__cgroup__memory__job__memory.oom_control": text}
    rooms(tmp_path, **files)
    assert num_memory_kills(tmp_path) == 5
