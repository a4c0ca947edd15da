"""Free memory by the kernel's files, and pages that are allocated before they are used."""

import mmap
import os
import threading
import time

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.region import Region, prefault
from kvtier.memory.rendezvous import Meeting, SharedFile
from kvtier.memory.this_process import require_free, start_thread

MIB = 1 << 20


def machine(root, *, groups="0::/\n", available_bytes=1_000 * MIB, **files):
    """Write the kernel's files of a machine: /proc, and control-group files by path (`__` stands for `/`)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {available_bytes // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(file.name.replace("memory_", "memory.")).write_text(text)
    return str(root)


def limited(group, limit_mib, used_mib, cache_mib=0):
    half = cache_mib * MIB // 2
    return {
        f"{group}memory_max": f"{limit_mib * MIB}\n",
        f"{group}memory_current": f"{used_mib * MIB}\n",
        f"{group}memory_stat": f"anon 1\ninactive_file {half}\nactive_file {half}\n",
    }


VERSION_1 = {
    "memory__pod__memory_limit_in_bytes": str(500 * MIB),
    "memory__pod__memory_usage_in_bytes": str(100 * MIB),
    "memory__pod__memory_stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file {20 * MIB}\n",
}


def free_bytes(root):
    low, high = 0, 1 << 62
    while low < high:
        middle = (low + high + 1) // 2
        try:
            require_free(middle, root=root)
            low = middle
        except ConfigError:
            high = middle - 1
    return low


def test_a_size_above_the_available_memory_is_refused(tmp_path):
    root = machine(tmp_path, available_bytes=100 * MIB)
    require_free(100 * MIB, root=root)
    message = (
        r"(?m)^104,857,601 bytes of host memory were asked for and 104,857,600 are free in this machine's memory"
        r" \(MemAvailable\): ask for fewer bytes, or free some$"
    )
    with pytest.raises(ConfigError, match=message):
        require_free(100 * MIB + 1, root=root)


def test_a_control_group_leaves_its_limit_less_used_memory_except_page_cache(tmp_path):
    root = machine(tmp_path, groups="0::/pod\n", **limited("pod__", 500, 300, 40))
    assert free_bytes(root) == 240 * MIB
    with pytest.raises(ConfigError, match=r"control group .*/sys/fs/cgroup/pod: .* raise its memory.max"):
        require_free(241 * MIB, root=root)


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/pod/engine\n", limited("pod__", 500, 450) | limited("pod__engine__", 400, 100), 50),  # The tightest.
        ("0::/host/path/of/it\n", limited("", 500, 200), 300),  # A container finds its group at the root.
        ("0::/pod\n", {"pod__memory_max": "max\n"}, 1_000),
        ("12:cpu,cpuacct:/pod\n4:memory:/pod\n1:name=systemd:/\n0::/\n", VERSION_1, 430),
    ],
)
def test_every_limited_control_group_counts(tmp_path, groups, files, free):
    assert free_bytes(machine(tmp_path, groups=groups, **files)) == free * MIB


def test_a_group_above_its_limit_has_nothing_free(tmp_path):
    root = machine(tmp_path, groups="0::/pod\n", **limited("pod__", 100, 110))
    with pytest.raises(ConfigError, match="and 0 are free in control group"):
        require_free(1, root=root)


def test_a_kernel_without_control_groups_has_only_its_memory(tmp_path):
    root = machine(tmp_path)
    os.unlink(tmp_path / "proc/self/cgroup")
    assert free_bytes(root) == 1_000 * MIB


def test_this_machine_can_be_read():
    require_free(1)
    with pytest.raises(ConfigError):
        require_free(1 << 60)


def test_a_size_above_the_free_file_system_is_refused(small_tmpfs):
    path = str(small_tmpfs / "region")
    with pytest.raises(ConfigError, match=rf"free in {small_tmpfs}: .*--shm-size"):
        Region.shared(path, 512, 4_096, participant=0, participants=2)
    assert os.listdir(small_tmpfs) == []
    Region.shared(path, 128, 4_096, participant=0, participants=2).close()
    assert os.listdir(small_tmpfs) == []


def test_a_file_system_that_fills_up_during_the_start_is_an_error(small_tmpfs):
    path = str(small_tmpfs / "region")
    file = SharedFile.meet(Meeting(path, 128, 4_096, 2, 0), timeout_s=1.0)  # It allocates no rows.
    (small_tmpfs / "other").write_bytes(bytes(800 * 1024))
    with pytest.raises(ConfigError, match="No space left on device"):
        Region.shared(path, 128, 4_096, participant=1, participants=2)
    file.leave()


def test_prefaulting_changes_no_byte_wherever_it_begins():
    with mmap.mmap(-1, 130 * MIB) as mapping:
        for first in (0, 65 * MIB, 129 * MIB):
            mapping[first : first + 5] = b"bytes"
            prefault(mapping, None, first)
            assert mapping[first : first + 5] == b"bytes"
        assert sum(mapping[start] for start in range(0, len(mapping), 4_096)) == 3 * ord("b")


def test_a_thread_whose_start_is_interrupted_can_be_joined():
    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

        def set(self):
            time.sleep(0.05)
            super().set()

    thread = threading.Thread(target=lambda: None)
    thread._started = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        start_thread(thread)
    thread.join()
