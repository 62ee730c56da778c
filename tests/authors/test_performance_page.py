"""docs/performance.md and lab_notes.md have the recorded figures, with their versions and dates, and mark those of a
kernel that has changed since."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest

from aotops.bench import report as bench_report
from aotops.bench import sources
from aotops.ops import OPS
from benchmarks import report

CUDA_SRC = report.ROOT / "cuda_src"


def test_the_pages_are_those_of_the_result():
    pages = [page.read_text() for page in report.PAGES]
    assert sorted(found[2] for page in pages for found in report.SECTION.finditer(page)) == sorted(report.SECTIONS)
    assert pages == [report.written(page) for page in pages], "run python -m benchmarks.report"


def test_the_plots_are_those_of_the_result():
    image = pytest.importorskip("PIL.Image")
    drawn = bench_report.drawn(json.loads((report.RESULTS / "h200.json").read_text()))
    found = {file.stem: image.open(file).text.get("Record") for file in (report.RESULTS / "h200").iterdir()}
    told = "run the command of docs/performance.md that has --plots"
    assert found == {op: bench_report.digest(rows) for op, rows in drawn.items()}, told


def test_the_table_of_what_is_behind_has_what_is_behind():
    """By the fastest peer, from 1 % on; a row without peers is not compared."""

    def row(impl, us, n=4096, **more):
        shape = [1 << 26 >> n.bit_length() - 1, n] if n > 256 else [8, n]
        case = {"op": "softmax", "variant": "", "pass": "forward", "shape": shape, "dtype": "bfloat16"}
        own = {"version": "0.0.1", "kernel": sources.of_kernel("softmax")} if impl == "aotops" else {}
        return {**case, "impl": impl, "us": us, "date": "2001-01-01", **own, **more}

    rows = [row("aotops", 70.0), row("torch", 69.0), row("quack", 68.0)]
    rows += [row("aotops", 70.0, 8192), row("torch", 69.4, 8192)]
    rows += [row("aotops", 70.0, 32768)]
    rows += [row("aotops", 2.0, 256), row("torch", 1.0, 256), row("torch", 0.1, 256, dtype="float32")]
    lines = report.ahead({"rows": rows, "versions": {"torch": "2.0"}}).splitlines()
    assert lines[0] == "A peer is more than 1 % ahead in 1 of 2 cases and 1 of 1 small calls:"
    assert lines[4:6] == [
        "| softmax | forward | 16384 x 4096 | bfloat16 | quack | 70.00 | 68.00 | 0.97 |",
        "| softmax | forward | 8 x 256 | bfloat16 | torch | 2.00 | 1.00 | 0.50 |",
    ]
    assert lines[6:] == ["", "aotops 0.0.1, torch 2.0, 2001-01-01."]


def test_the_table_of_the_cpu_has_the_cases_in_which_torch_is_ahead():
    """At any count of threads, from 5 % on."""

    def row(impl, threads, us, op="softmax", date="2001-01-01", **more):
        case = {"op": op, "variant": "", "pass": "forward", "shape": [8, 256], "dtype": "float32"}
        kernel = sources.of_kernel(op, device="cpu") if date == "2001-01-01" else "cpu:of the past"
        own = {"version": "0.0.1", "kernel": kernel} if impl == "aotops" else {}
        return {**case, "threads": threads, "impl": impl, "us": us, "date": date, **own, **more}

    rows = [row("aotops", 2, 4.0), row("torch", 2, 3.9), row("aotops", 1, 4.0), row("torch", 1, 2.0)]
    rows += [row("aotops", 1, 4.0, dtype="bfloat16"), row("torch", 1, 3.9, dtype="bfloat16")]
    rows += [row("aotops", 1, 5.0, "gelu", "2001-01-02"), row("torch", 1, 4.0, "gelu")]
    rows += [row("aotops", 1, 5.0, "add", "2001-01-02"), row("torch", 1, 5.0, "add")]
    result = {"rows": rows, "versions": {"torch": "2.0"}}
    counts, table = report.cpu_ahead(result).split("\n\n", 1)
    assert counts.replace("\n", " ") == (
        "Cases in which torch is more than 5 % ahead, by threads: 2 of 4 at 1, 0 of 1 at 2. The medians of our speed "
        "beside torch's: 0.89, 0.97. Kernels that have changed since: `gelu`, `add`."
    )
    assert table.splitlines() == [
        "| operator | pass | shape | dtype | 1 thread | 2 threads |",
        "|---|---|---|---|--:|--:|",
        "| softmax | forward | 8 x 256 | float32 | 0.50 | 0.97 |",
        "| gelu \\* | forward | 8 x 256 | float32 | 0.80 |  |",
        "",
        "aotops 0.0.1, torch 2.0, 2001-01-01 to 2001-01-02.",
        "\\* Measured before the last change of the kernel.",
    ]


def test_each_row_says_what_it_measured():
    for row in report.load("machine")["rows"]:
        assert row["date"] >= "2026-11-21"
        assert row["impl"] != "aotops" or (row["version"] and len(row["kernel"]) == 12)


@pytest.mark.parametrize(
    ("name", "op", "lines"),
    [
        ("elementwise", "add", 1),
        ("rows_bfloat16", "softmax", 2),
        ("rows_float32", "cross_entropy", 3),
        ("matmul", "matmul", 3),
        ("products", "linear", 2),
        ("linear_gelu", "linear", 7),
        ("conv2d", "conv2d", 5),
        ("ahead", None, None),  # of the operator in the first row, since the record decides which there are
        ("cpu", None, None),
    ],
)
def test_a_row_is_marked_if_its_kernel_has_changed(name, op, lines):
    result = copy.deepcopy(report.load(name))
    for row in result["rows"]:
        if row["impl"] == "aotops":
            row["kernel"] = sources.of_kernel(row["op"], device="cpu" if name == "cpu" else "cuda")
    fresh = report.SECTIONS[name](result)
    assert "\\*" not in fresh
    if op is None:
        op = re.search(r"--:\|\n\| (\w+) ", fresh)[1]
        lines = sum(line.startswith(f"| {op} ") for line in fresh.splitlines())
    for row in result["rows"]:
        if (row["impl"], row["op"]) == ("aotops", op):
            row |= {"kernel": "of the past", "date": "2001-01-01", "version": "0.0.1"}
    marked = report.SECTIONS[name](result)
    assert "\\* Measured before the last change of the kernel." in marked
    assert "aotops 0.0.1" in marked
    assert "2001-01-01" in marked
    assert sum(" \\* " in line for line in marked.splitlines()) == lines


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources. Hashes are kept by folder, so it has to be edited before it is hashed."""
    return shutil.copytree(CUDA_SRC, tmp_path / "cuda_src", ignore=shutil.ignore_patterns("*.cpp"))


def hashes(tree, device="cuda"):
    return {op: sources.of_kernel(op, tree, device) for op in OPS}


def test_a_hash_is_that_of_the_code(tree):
    """Not of comments, white space and files that the device does not run."""
    before = hashes(CUDA_SRC)
    assert all(before.values())
    assert len(set(before.values())) == len(before)
    for file in tree.rglob("*.cu*"):
        file.write_text('// a comment: "\n' + file.read_text().replace("\n", "\n\n") + '/* "another */\n')
    (tree / "aot.h").write_text((tree / "aot.h").read_text() + "int more;\n")
    assert hashes(tree) == before


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("operators/gelu.cu", {"gelu"}),
        ("operators/gelu.h", {"gelu"}),
        ("operators/norm/norm.cuh", {"layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"}),
        ("cuda/softmax.cuh", {"softmax", "cross_entropy", "cross_entropy_lse", "linear_cross_entropy"}),
        (
            "gemm/gemm_16bit_sm90.cu",
            {"linear", "linear_cross_entropy", "linear_cross_entropy_lse", "matmul", "lltm", "conv2d"},
        ),
        ("conv/conv2d_sm90.cu", {"conv2d"}),
        ("cuda/vector.cuh", None),  # all
    ],
)
def test_an_edit_changes_the_hashes_of_what_includes_it(tree, file, expected):
    before = hashes(CUDA_SRC)
    (tree / file).write_text((tree / file).read_text() + "int more;\n")
    after = hashes(tree)
    assert {op for op in before if before[op] != after[op]} == (expected or set(before))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("operators/swiglu.cpp", {"swiglu"}),
        ("operators/attention.cpp", {"attention", "qkv_attention"}),
        ("operators/norm/rms_norm.cpp", {"rms_norm"}),
        ("operators/linear.cpp", {"linear", "linear_cross_entropy", "linear_cross_entropy_lse"}),
        ("cpu/threads.cpp", None),  # all
        ("cuda/softmax.cuh", set()),
    ],
)
def test_an_edit_changes_the_hashes_on_the_cpu(tmp_path, file, expected):
    tree = shutil.copytree(CUDA_SRC, tmp_path / "cuda_src")
    before = hashes(CUDA_SRC, "cpu")
    assert all(before.values())
    (tree / file).write_text((tree / file).read_text() + "int more;\n")
    after = hashes(tree, "cpu")
    assert {op for op in before if before[op] != after[op]} == (set(before) if expected is None else expected)


def test_there_are_no_sources_in_a_wheel(tmp_path):
    assert sources.of_kernel("gelu", tmp_path) is None
    assert sources.of_kernel("gelu", tmp_path, "cpu") is None
