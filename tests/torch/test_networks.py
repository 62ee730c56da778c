"""benchmarks.networks and exchange: the exchanged functions compute what torch's do; the command writes what it
measures, and fails where first losses are apart; the page has the table of the record."""

import json
import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks import exchange, networks  # noqa: E402


class Small(nn.Module):
    """Calls every function that is exchanged."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8, momentum=None)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.BatchNorm2d(8)
        self.norm3 = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, images, classes):
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(images)))))
        y = self.norm(self.norm3(y).flatten(2).mT)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)
        y = functional.gelu(functional.gelu(y), approximate="tanh").mean(1)
        return functional.cross_entropy(self.head(y), classes, label_smoothing=0.1)


def trained(exchanged, backend=None):
    """The losses of three steps, the last gradients and the state."""
    torch.manual_seed(0)
    model = Small().double()
    run = torch.compile(model, backend=backend) if backend else model
    losses = []
    for _ in range(3):
        model.zero_grad()
        images = torch.randn(4, 3, 12, 12, dtype=torch.float64).to(memory_format=torch.channels_last)
        loss = exchanged(run, images, torch.randint(5, (4,)))
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: p.grad for name, p in model.named_parameters()}, model.state_dict()


def exchanged(call, *args):
    with exchange.exchanged():
        return call(*args)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_functions_agree_with_torchs(backend, monkeypatch):
    """Running statistics too, of both momenta."""
    calls = Counter()

    def counted(name, function):
        def called(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return called

    expected = trained(lambda call, *args: call(*args))
    assert expected[2]["norm1.running_var"].sub(1).abs().max() > 0.1
    if backend is None:
        for name in exchange.FUNCTIONS:
            monkeypatch.setattr(exchange.aotops, name, counted(name, getattr(exchange.aotops, name)))
            monkeypatch.setattr(exchange.TORCHS, name, None)
    torch.testing.assert_close(trained(exchanged, backend), expected, rtol=1e-9, atol=1e-11)
    assert backend or min(calls[name] for name in exchange.FUNCTIONS) >= 3
    assert functional.linear is not exchange.linear


GRAPHS = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from benchmarks.exchange import exchanged

{before}
graphs = []


def compiled(graph, inputs):
    graphs.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


convs = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
model = nn.Sequential(convs[0], norms[0], nn.SiLU(inplace=True), convs[1], norms[1], nn.Hardswish(inplace=True))
images = torch.randn(2, 3, 8, 8)
run = torch.compile(lambda: model(images).square().mean(), backend=compiled)
counters.clear()
with exchanged():
    for _ in range(2):
        run().backward()
targets = [node.target for graph in graphs for node in graph.graph.nodes]
print(len(graphs), sum(counters["graph_break"].values()), targets.count(torch.ops.aotops.batch_norm.default))
print([norm.running_mean.abs().max() > 0 for norm in norms])
"""


BEFORE = 'torch.compile(functional.relu, backend="eager")(torch.ones(3))'


@pytest.mark.parametrize("before", ["", BEFORE], ids=["first", "later"])
def test_a_compiled_network_is_one_graph(before, python):
    """In a process that has compiled nothing, and in one that has. A graph that ends between a norm and an activation
    in place is torch's error in the backward."""
    printed = python(GRAPHS.format(before=before), PYTHONPATH=str(networks.ROOT)).splitlines()
    assert printed == ["1 0 2", "[tensor(True), tensor(True)]"]


def test_what_is_not_taken_is_torchs():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 2, 2)
    mean, var = torch.randn(4), torch.rand(4) + 1
    q = torch.randn(5, 2, 3, 4)
    calls = {
        "an even kernel": lambda: functional.conv2d(x, weight, padding="same"),
        "complex": lambda: functional.conv2d(x.cfloat(), weight.cfloat()),
        "evaluation": lambda: functional.batch_norm(x, mean, var, training=False),
        "probabilities": lambda: functional.cross_entropy(x[:, :, 0, 0], x[:, :, 0, 0].softmax(1)),
        "pixels": lambda: functional.cross_entropy(x, torch.ones(2, 6, 6, dtype=torch.int64)),
        "sums": lambda: functional.cross_entropy(x[0, 0], torch.arange(6), size_average=False),
        "two dtypes": lambda: functional.layer_norm(x.bfloat16(), (6,), torch.ones(6), torch.zeros(6)),
        "all is dropped": lambda: functional.scaled_dot_product_attention(q, q, q, dropout_p=1.0),
        "a broadcast axis": lambda: functional.scaled_dot_product_attention(q, q[:1], q[:1]),
    }
    for what, call in calls.items():
        message = lambda m, what=what: f"{what}: {m}"  # noqa: E731
        torch.testing.assert_close(exchanged(call), call(), rtol=0, atol=0, equal_nan=True, msg=message)
    wrong = {
        TypeError: lambda: functional.batch_norm(x, mean, var, training=True, momentum=None),
        ValueError: lambda: functional.batch_norm(x[:1, :, :1, :1], mean, var, training=True),
        RuntimeError: lambda: functional.linear(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2)),
    }
    for error, call in wrong.items():
        with pytest.raises(error) as torchs:
            call()
        with pytest.raises(error) as found:
            exchanged(call)
        assert str(found.value) == str(torchs.value)


def test_command(tmp_path):
    file = tmp_path / "rows.json"
    networks.main(["--tiny", "--impls", "torch,replace", "--at-once", "2", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["network"], row["impl"]) for row in rows] == [("unet", "torch"), ("unet", "replace")]
    theirs, ours = (row["losses"] for row in rows)
    assert ours == pytest.approx(theirs, abs=2e-3)
    assert theirs[-1] < theirs[0] - 0.1
    assert min(row[key] for row in rows for key in ("ms", "host_ms")) > 0
    networks.main(["--tiny", "--within", "0", "--json", str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(("loss", "is_right"), [(7.03125, True), (7.125, False), (math.nan, False)])
def test_first_losses_that_are_apart_are_a_failure(loss, is_right, tmp_path, monkeypatch):
    """The rows of a record may be of several runs."""
    losses = {"torch.compile": 6.96875, "torch": 7.0, "replace": loss}
    times = {"ms": 2.0, "host_ms": 1.0, "peak_gib": 1.0}

    def measured(name, impl, *_):
        return {"network": name, "impl": impl, **times, "losses": [losses[impl], 1.0]}

    monkeypatch.setattr(networks, "measure", measured)
    for impl in losses:
        run = ["deit", "--impls", impl, "--json", str(tmp_path / "rows.json")]
        if is_right or impl != "replace":
            networks.main(run)
        else:
            with pytest.raises(SystemExit, match=f"deit replace: loss {loss}, torch's 7.0"):
                networks.main(run)


def test_the_page_has_the_table_of_the_record(tmp_path, monkeypatch):
    text = networks.PAGE.read_text()
    assert networks.page(text) == text, "run python -m benchmarks.networks --page"
    monkeypatch.setattr(networks, "RESULTS", tmp_path / "record.json")
    empty = networks.page(text)
    assert "<!-- networks: steps -->\n<!-- end -->" in empty
    figures = {"ms": 30.0, "kernels": {"busy_ms": 20.0}, "peak_gib": 2.5}
    rows = [{"network": "swin", "impl": "torch.compile"} | figures]
    rows.append({"network": "swin", "impl": "aotops.compile"} | figures | {"ms": 15.0})
    record = {"device": "a GPU", "date": "then", "versions": {"torch": "2"}, "rows": rows}
    networks.RESULTS.write_text(json.dumps(record))
    line = "| Swin-T | 64 |  |  | 30.0, 20.0, 2.5 |  | 15.0, 20.0, 2.5 |  | 0.50, 1.00, 1.00 |"
    assert f"\n{line}\n\na GPU, torch 2, then.\n<!-- end -->" in networks.page(text)


def test_a_row_that_is_added_has_its_own_day(tmp_path):
    file, head = tmp_path / "record.json", {"device": "a GPU", "date": "2001-01-01", "versions": {"torch": "2"}}
    old, new = ({"network": "swin", "impl": impl, "ms": 1.0} for impl in ("torch", "replace"))
    file.write_text(json.dumps(head | {"rows": [old]}))
    networks.replaced.add(file, head | {"date": "2001-01-02"}, [new], networks.ORDER)
    record = json.loads(file.read_text())
    assert [row["date"] for row in record["rows"]] == ["2001-01-01", "2001-01-02"]
    assert networks.replaced.measured(record) == "a GPU, torch 2, 2001-01-01 to 2001-01-02."


def test_time_in_which_two_kernels_run_counts_once():
    assert networks.kernels.covered([(0.0, 2.0), (1.0, 3.0), (1.0, 1.5), (5.0, 6.0)]) == 4.0


def test_the_record_is_whole():
    rows = json.loads(networks.RESULTS.read_text())["rows"] if networks.RESULTS.exists() else []
    assert networks.apart(rows) == []
    assert all(row["ms"] > 0 and len(row["kernels"]["top"]) == networks.LISTED for row in rows)
