"""The launches that a driver is told by entries of Triton kernels, with tests/programs/fake_cuda.c in its place."""

from __future__ import annotations

import struct
import threading

import pytest
from triton_entry import Driver, Entry

F32 = "float32"


def add(n, at=4096):
    return [(at, (n,), F32), (at + (1 << 20), (n,), F32), (at + (2 << 20), (n,), F32)]


def launched(lines):
    """The kernel of each launch, and the facts about it."""
    found = []
    for line in lines:
        if line.startswith("launch "):
            kernel, *facts = line.split()[1:]
            found.append((kernel, dict(fact.split("=") for fact in facts)))
    return found


def refused(call, *args, kind=Exception, words=""):
    with pytest.raises(kind, match=words):
        call(*args)


def main(driver_file: str, library: str) -> None:
    entry = Entry(library, "vector_add")
    entry.init()  # without a driver
    plan = entry.plan(add(100), capability=90)
    assert plan["arch"] == "sm_90a"
    assert entry.plan(add(100), capability=86)["arch"] == "sm_80"
    refused(
        entry.plan,
        add(100),
        "",
        75,
        kind=NotImplementedError,
        words=r'compute capability 7.5 .*sm_80, sm_90a.*"75" in archs',
    )
    refused(entry.plan, add(100), "", 103, kind=NotImplementedError, words="10.3")

    driver = Driver(driver_file)
    driver.device(0)
    driver.parameters(6)
    entry.init()
    loads = driver.told()
    assert loads
    assert all(line.startswith("load device=0 mode=2") for line in loads), loads
    entry.call(add(100), stream=7)
    ((kernel, facts),) = launched(told := driver.told())
    assert len(told) == 1, told  # nothing else: Init has loaded the code
    assert kernel == "add_kernel"
    assert (facts["grid"], facts["threads"], facts["stream"]) == ("1,1,1", "64", "7")
    assert facts["values"] == f"4096,{4096 + (1 << 20)},{4096 + (2 << 20)},100,0,0"
    entry.call(add(65536))
    assert launched(driver.told())[0][1]["grid"] == "64,1,1"
    entry.call(add(0))
    assert not driver.told()

    hints = [entry.plan(add(n, at))["launches"][0]["hint"] for n, at in ((64, 4096), (65, 4096), (64, 4100))]
    assert hints == [0, 1, 2]
    refused(entry.call, add(1 << 31), kind=ValueError, words="argument n of kernels.py:add_kernel is 2147483648.*i64")
    refused(entry.call, [(4096, (3,), "int64")] * 3, kind=TypeError, words="x has dtype int64, expected float32")
    refused(entry.call, [(4096, (3,), F32), (4096, (4,), F32), (4096, (3,), F32)], kind=ValueError,
            words=r"y has shape \(4,\), expected \[\*n\], where \*n is \(3,\)")  # fmt: skip

    # another device, from several threads at once
    def call_on_one():
        driver.device(1)
        for _ in range(50):
            entry.call(add(64))

    threads = [threading.Thread(target=call_on_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = driver.told()
    assert len(launched(told)) == 200
    assert sorted(set(told) & set(loads)) == []
    driver.device(-1)  # a thread without a context takes that of the stream
    entry.call(add(64), stream=3)
    assert driver.told()[0] == "set-current"

    scratch(driver, Entry(library, "norm_backward"))
    driver.device(4)
    driver.gpu(75, 65536)
    refused(entry.call, add(64), kind=NotImplementedError, words="no code for Fake 4, compute capability 7.5")
    driver.gpu(90, 232448)
    driver.device(5)
    driver.fails(700)
    refused(
        entry.call, add(64), kind=RuntimeError, words=r"vector_add: cuModuleLoadData: a fake error \(CUDA error 700\)"
    )


def scratch(driver, entry) -> None:
    """Two launches, with partial sums in the workspace."""
    driver.device(0)
    m, n, attrs = 70, 33, "eps=0.5"
    work = 1000  # not a multiple of 256
    shapes = {
        "dy": (m, n),
        "x": (m, n),
        "weight": (n,),
        "mean": (m,),
        "rstd": (m,),
        "dx": (m, n),
        "dweight": (n,),
        "dbias": (n,),
    }
    tensors = [((i + 1) << 32, shape, F32) for i, shape in enumerate(shapes.values())]
    at = {name: tensor[0] for name, tensor in zip(shapes, tensors, strict=True)}
    first, size = 1024, -(-64 * n * 4 // 256) * 256
    room = (2 * size + 256) // 4
    driver.parameters(13)
    refused(entry.call, [*tensors, (work, (room - 1,), F32)], attrs, kind=ValueError, words="workspace")
    plan = entry.plan([*tensors, (work, (room,), F32)], attrs)
    one, two = plan["launches"]
    assert one["values"][-3 - 4 : -2] == [first, first + size, m, n, 64][-5:], one
    assert one["grid"] == [64, 1, 1]
    assert two["values"] == [first, first + size, at["dweight"], at["dbias"], 64, n, 0, 0]
    assert two["grid"] == [1, 1, 1]
    driver.parameters(8)
    driver.told()
    entry.call([*tensors, (work, (room,), F32)], attrs)
    assert [kernel for kernel, _ in launched(driver.told())] == ["norm_backward_kernel", "column_sums_kernel"]
    # a residual that is left out is in the workspace
    forward = Entry(driver_library(entry), "norm")
    tensors = [(1 << 32, (m, n), F32), (2 << 32, (n,), F32), (3 << 32, (n,), F32), (4 << 32, (m, n), F32)]
    room = (2 * 512 + 256) // 4
    left_out = forward.plan([*tensors, (work, (room,), F32)], f"{attrs}\noutputs=9")
    assert left_out["launches"][0]["values"][4:6] == [first, first + 512]
    given = [*tensors, (5 << 32, (m,), F32), (6 << 32, (m,), F32), (work, (room,), F32)]
    values = forward.plan(given, attrs)["launches"][0]["values"]
    assert values[4:6] == [5 << 32, 6 << 32]
    assert struct.unpack("<f", values[7].to_bytes(4, "little")) == (0.5,)


def driver_library(entry) -> str:
    return entry.lib._name


def attributes(driver_file: str, library: str) -> None:
    """Launches that have more than a grid, of tests/programs/triton_attributes."""
    copied, doubled, large = (Entry(library, name) for name in ("copied", "doubled", "large"))
    driver = Driver(driver_file)
    driver.device(0)
    x = [(1 << 32, (100, 80), F32), (2 << 32, (100, 80), F32)]
    driver.parameters(6)
    # 4 x 3 blocks need 256 bytes each, for the larger of two configurations: 7 x 5 blocks
    room = (35 * 256 + 256) // 4
    refused(copied.call, [*x, (1000, (room - 1,), F32)], kind=ValueError, words="workspace has shape")
    copied.call([*x, (1000, (room,), F32)])
    ((_, facts),) = launched(driver.told())
    assert (facts["grid"], facts["values"]) == ("4,3,1", f"{1 << 32},{2 << 32},100,80,1024,0")
    assert facts["6"] == "1"  # programmatic stream serialization
    refused(copied.call, x, kind=RuntimeError, words="copied: the workspace is missing")

    driver.parameters(5)
    n = [(1 << 32, (100000,), F32), (2 << 32, (100000,), F32)]
    doubled.call(n, stream=9)
    filled, launch = [line for line in driver.told() if not line.startswith("load")]
    assert filled == f"fill {2 << 32} 0 400000 stream=9"
    ((_, facts),) = launched([launch])
    assert (facts["grid"], facts["4"], facts["5"]) == ("98,1,1", "2", "1")  # 49 clusters of 2
    doubled.call([(1 << 32, (10,), F32), (2 << 32, (10,), F32)])
    ((_, facts),) = launched(driver.told())
    assert facts["2"] == "1"  # cooperative

    driver.parameters(6)
    a = [(1 << 32, (128, 256), "float16"), (2 << 32, (256, 128), "float16"), (3 << 32, (128, 128), F32)]
    large.call(a)
    told = driver.told()
    (attribute,) = [line for line in told if line.startswith("attribute")]
    ((_, facts),) = launched(told)
    assert attribute == f"attribute large_kernel 8={facts['shared']}"
    assert int(facts["shared"]) > 48 << 10
    odd = [(1 << 32, (128, 100), "float16"), (2 << 32, (100, 128), "float16"), (3 << 32, (128, 128), F32)]
    refused(
        large.call,
        odd,
        kind=NotImplementedError,
        words="large: no configuration of kernel.py:large_kernel is for these",
    )
    refused(
        large.call, [(8, *a[0][1:]), *a[1:]], kind=NotImplementedError, words="large: no hints of .* hold for these"
    )
    refused(
        large.call,
        [(8, (64, 128), "float16"), *a[1:]],
        kind=ValueError,
        words=r"a has shape \(64, 128\), expected \[128, K\]",
    )
    looping(driver, library)
    driver.device(1)
    driver.gpu(90, 65536)
    refused(large.call, a, kind=NotImplementedError, words="needs .* bytes of shared memory, this GPU has 65536")


def looping(driver, library: str) -> None:
    """Grids that depend on the GPU's multiprocessors. The workspace does not: it has room for any GPU."""
    looped, copied = Entry(library, "looped"), Entry(library, "copied_rows")
    rows = [(1 << 32, (1000, 40), F32), (2 << 32, (1000, 40), F32)]
    assert looped.plan(rows)["launches"][0]["grid"] == [264, 1, 1]
    found = {}
    for device, multiprocessors in ((2, 20), (3, 1000)):
        driver.device(device)
        driver.multiprocessors(multiprocessors)
        driver.parameters(6)
        driver.told()
        looped.call(rows)
        ((_, facts),) = launched(driver.told())
        assert facts["grid"] == f"{min(2 * multiprocessors, 512)},1,1"  # grids know of 256 multiprocessors at most
        wide = [(1 << 32, (1000, 64), F32), (2 << 32, (1000, 64), F32)]
        room = (256 * 128 + 256) // 4
        refused(copied.call, [*wide, (1000, (room - 1,), F32)], kind=ValueError, words="workspace has shape")
        copied.call([*wide, (1000, (room,), F32)])
        ((_, facts),) = launched(driver.told())
        found[device] = facts["grid"]
    assert found == {2: "20,1,1", 3: "256,1,1"}
