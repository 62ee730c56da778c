"""MindSpore: PyNative and graph mode, cells, dynamic shapes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")

from mindspore import Tensor, nn, ops  # noqa: E402
from mindspore.dataset import NumpySlicesDataset  # noqa: E402
from mindspore.train import Callback, CheckpointConfig, LossMonitor, Model, ModelCheckpoint  # noqa: E402

from aotops.frontends import mindspore as ours  # noqa: E402
from aotops.frontends.mindspore.primitives import differentiable  # noqa: E402
from aotops.ops import BUILTIN, OPS  # noqa: E402
from aotops.testing.cases import CASES, row_samples  # noqa: E402
from aotops.testing.frameworks import MindSpore  # noqa: E402
from aotops.testing.trial import Trial  # noqa: E402

MODES = pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
F32 = ms.float32


@pytest.fixture(autouse=True)
def _pynative_again():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def tensors(dtype="float32"):
    random = np.random.default_rng(0)
    return tuple(Tensor(random.normal(size=s).astype(dtype)) for s in ((4, 6), (6,), (6,)))


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=tolerance, atol=tolerance)


class Ours(nn.Cell):
    def construct(self, x, w, b):
        return ours.layer_norm(ours.gelu(ours.add(x, w)), (6,), w, b, 1e-5)


class Theirs(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer_norm = ops.LayerNorm(1, 1, 1e-5)

    def construct(self, x, w, b):
        return self.layer_norm(ops.gelu(x + w, approximate="none"), w, b)[0]


class Loss(nn.Cell):
    """A number whose gradient differs from element to element."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, *tensors):
        return (self.cell(*tensors).astype(F32) ** 3).sum()


@MODES
def test_cells_and_their_gradients(mode):
    """Ops in a chain, each input used twice."""
    ms.set_context(mode=mode)
    args, dy = tensors(), Tensor(np.random.default_rng(1).normal(size=(4, 6)), F32)
    close(Ours()(*args), Theirs()(*args))
    grads = [ops.GradOperation(get_all=True, sens_param=True)(cell)(*args, dy) for cell in (Ours(), Theirs())]
    for a, b in zip(*grads, strict=True):
        close(a, b, 2e-4)


@MODES
def test_value_and_grad_of_some_positions(mode):
    ms.set_context(mode=mode)
    args = tensors()

    (a, da), (b, db) = (ms.value_and_grad(Loss(cell), (1,))(*args) for cell in (Ours(), Theirs()))
    close(a, b)
    close(da[0] if isinstance(da, tuple) else da, db[0] if isinstance(db, tuple) else db, 1e-3)


def test_jit_function():
    @ms.jit
    def function(x, w, b):
        return ours.layer_norm(x, 6, w, b) + ours.gelu(x, "tanh")

    x, w, b = tensors()
    expected = ops.LayerNorm(1, 1, 1e-5)(x, w, b)[0] + ops.gelu(x, approximate="tanh")
    close(function(x, w, b), expected)


@MODES
def test_dynamic_rows(mode):
    """The number of rows is open: one graph for all."""
    ms.set_context(mode=mode)
    _, w, b = tensors()
    cell = Ours()
    cell.set_inputs(Tensor(shape=(None, 6), dtype=F32), w, b)
    for rows in (1, 5, 3, 300):
        x = Tensor(np.random.default_rng(rows).normal(size=(rows, 6)), F32)
        close(cell(x, w, b), Theirs()(x, w, b), 1e-4)


@MODES
def test_gradients_of_dynamic_rows(mode):
    """A kernel's workspace grows with them."""
    ms.set_context(mode=mode)
    _, w, b = tensors()

    class Gradient(nn.Cell):
        def __init__(self, cell):
            super().__init__()
            self.loss, self.gradient = Loss(cell), ops.GradOperation(get_all=True)

        def construct(self, x, w, b):
            return self.gradient(self.loss)(x, w, b)

    cell = Gradient(Ours())
    cell.set_inputs(Tensor(shape=(None, 6), dtype=F32), w, b)
    for rows in (2, 700, 5):
        x = Tensor(np.random.default_rng(rows).normal(size=(rows, 6)), F32)
        for a, e in zip(cell(x, w, b), Gradient(Theirs())(x, w, b), strict=True):
            close(a, e, 2e-3)


class Entropy(nn.Cell):
    def construct(self, x, target):
        return ours.cross_entropy(x, target)


class OfNumber(nn.Cell):
    """gelu of a number, and its gradient's way through one."""

    def construct(self, x):
        return ours.gelu(x.sum())


@MODES
def test_results_without_axes_of_dynamic_rows(mode):
    ms.set_context(mode=mode)
    loss, number, scalar = Entropy(), OfNumber(), ours.GELU(False)
    loss.set_inputs(Tensor(shape=(None, 6), dtype=F32), Tensor(shape=(None,), dtype=ms.int32))
    number.set_inputs(Tensor(shape=(None, 6), dtype=F32))
    scalar.set_inputs(Tensor(shape=(), dtype=F32))
    for rows in (2, 7, 3):
        x = Tensor(np.random.default_rng(rows).normal(size=(rows, 6)), F32)
        target = Tensor(np.arange(rows) % 6, ms.int32)
        close(loss(x, target), ops.cross_entropy(x, target))
        close(number(x), ops.gelu(x.sum(), approximate="none"))
        close(scalar(x[0, 0]), ops.gelu(x[0, 0], approximate="none"))
        assert loss(x, target).shape == number(x).shape == scalar(x[0, 0]).shape == ()
        close(ms.grad(loss)(x, target), ms.grad(ops.cross_entropy)(x, target), 1e-4)


@MODES
def test_a_norm_of_inputs_of_unknown_rank(mode):
    """As MindSpore's own: the axes are those of its parameters."""
    ms.set_context(mode=mode)
    own, theirs = ours.LayerNorm((6,)), nn.LayerNorm((6,), epsilon=ours.LayerNorm((6,)).epsilon)
    for cell in (own, theirs):
        cell.set_inputs(Tensor(shape=None, dtype=F32))
    x, _, _ = tensors()
    for given in (x, ops.stack((x, x + 1)), x[0]):
        close(own(given), theirs(given))


class Gradient(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.gradient = cell, ops.GradOperation()

    def construct(self, x):
        return self.gradient(self.cell)(x)


class Cube(nn.Cell):
    def construct(self, x):
        return ours.add(x, x) * ours.add(x, x) * x


# ------------------------------------------------------------------------------------------ derivatives of higher order


class Slope(nn.Cell):
    """The derivative of a function along directions, which differ from element to element."""

    def __init__(self, function, directions, floating):
        super().__init__()
        self.function, self.directions = function, directions
        self.gradient = ms.grad(self.curved, floating)

    def curved(self, *tensors):
        """The gradient depends on the result's values."""
        results = self.function(*tensors)
        if not isinstance(results, tuple):
            return ops.sin(results).sum()
        total = ops.sin(results[0]).sum()
        for result in results[1:]:
            if result.dtype not in (ms.int32, ms.int64):
                total = total + ops.cos(result).sum()
        return total

    def construct(self, *tensors):
        gradients = self.gradient(*tensors)
        if not isinstance(gradients, tuple):
            return (gradients * self.directions[0]).sum()
        total = (gradients[0] * self.directions[0]).sum()
        for gradient, direction in zip(gradients[1:], self.directions[1:]):  # noqa: B905  graph mode knows no strict
            total = total + (gradient * direction).sum()
        return total


def second_order(name, case, mode):
    """The derivatives of a slope along directions: by the gradient in a mode, and by differences."""
    random = np.random.default_rng(0)
    arrays = Trial(CASES[name], case, "float64", name).inputs
    ms.set_context(mode=ms.PYNATIVE_MODE)
    given = {slot: Tensor(x) for slot, x in arrays.items() if x is not None}
    cell, tensors = MindSpore()._function(name, {slot: given.get(slot) for slot in arrays}, case.attrs)
    order = [next(slot for slot, x in given.items() if x is t) for t in tensors]
    floating = tuple(i for i, slot in enumerate(order) if arrays[slot].dtype.kind == "f")
    slope = Slope(cell, tuple(Tensor(random.normal(size=tensors[i].shape)) for i in floating), floating)
    along = [random.normal(size=tensors[i].shape) for i in floating]
    expected = []
    for i, direction in zip(floating, along, strict=True):
        near = (
            [Tensor(arrays[s] + (h * direction if i == j else 0)) for j, s in enumerate(order)] for h in (1e-6, -1e-6)
        )
        ahead, behind = (float(slope(*tensors)) for tensors in near)
        expected.append((ahead - behind) / 2e-6)
    ms.set_context(mode=mode)
    gradients = ms.grad(slope, floating)(*tensors)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [float((g.asnumpy() * d).sum()) for g, d in zip(gradients, along, strict=True)], expected


SAMPLES = [
    pytest.param(name, case, mode, id=f"{name}{suffix}-{id}")
    for name in CASES
    if OPS[name].has_gradient
    for i, (suffix, case) in enumerate(row_samples(name).items())
    for mode, id in ((ms.PYNATIVE_MODE, "pynative"), (ms.GRAPH_MODE, "graph"))
    if mode == ms.PYNATIVE_MODE or i == 0
]


@pytest.mark.parametrize(("name", "case", "mode"), SAMPLES)
def test_second_order(name, case, mode):
    """By finite differences of the first order."""
    got, expected = second_order(name, case, mode)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7 * max(map(abs, expected)))


def test_higher_orders_need_known_dimensions_in_a_graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = Gradient(Gradient(ours.GELU(False)))
    cell.set_inputs(Tensor(shape=(None, 6), dtype=F32))
    with pytest.raises(NotImplementedError, match="gelu_backward: a dimension is unknown"):
        cell(tensors()[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_second_order_keeps_the_dtype(dtype):
    second = Gradient(Loss(Gradient(Loss(ours.GELU(False)))))
    x = tensors()[0].astype(getattr(ms, dtype))
    got, expected = second(x), second(x.astype(F32))
    assert got.dtype == x.dtype
    close(got.astype(F32), expected, {"float16": 0.05, "bfloat16": 0.2, "float32": 1e-6}[dtype])


class Sharp(nn.Cell):
    def construct(self, x):
        return 4 * ours.softmax(2 * x, -1)


class Sine(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x):
        return ops.sin(self.cell(x)).sum()


@MODES
def test_third_order(mode):
    """MindSpore's own sums and reshapes lose terms of it in PyNative mode, so that ours refuse it by name there."""
    ms.set_context(mode=mode)
    x = Tensor(np.random.default_rng(0).normal(size=(2, 3)))
    direction, h = np.random.default_rng(1).normal(size=(2, 3)), 1e-5
    eager = mode == ms.PYNATIVE_MODE
    for cell, raises in ((ours.GELU(False), False), (Sharp(), True))[: 1 + eager]:
        second = Sine(Gradient(Sine(Gradient(Sine(cell)))))
        if raises:
            with pytest.raises(NotImplementedError, match="softmax_backward: derivatives of the third order"):
                Gradient(second)(x)
            continue
        got = (Gradient(second)(x).asnumpy() * direction).sum()
        ahead, behind = (float(second(x + Tensor(t * direction))) for t in (h, -h))
        np.testing.assert_allclose(got, (ahead - behind) / (2 * h), rtol=1e-4)


@MODES
def test_forward_mode(mode, capfd):
    """And without a line in MindSpore's log: it opens the sources that are made for this."""
    ms.set_context(mode=mode)
    random = np.random.default_rng(0)
    x, tangent = random.normal(size=(2, 3)), random.normal(size=(2, 3))
    for function in (ours.gelu, Normed3()):
        y, dy = ms.jvp(function, Tensor(x), Tensor(tangent))
        ahead, behind = (function(Tensor(x + h * tangent)).asnumpy() for h in (1e-5, -1e-5))
        np.testing.assert_allclose(dy.asnumpy(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)
        close(y, function(Tensor(x)))
    assert [line for line in capfd.readouterr().err.splitlines() if "path[" in line or "may not exist" in line] == []


class Normed3(nn.Cell):
    def construct(self, x):
        return ours.layer_norm(x, 3)


@MODES
def test_add_is_differentiated_as_often_as_one_likes(mode):
    ms.set_context(mode=mode)
    x = tensors()[0]
    close(Gradient(Gradient(Cube()))(x), 24 * x)
    close(Gradient(Gradient(Gradient(Cube())))(x), 24 * ops.ones_like(x))


class Axis(nn.Cell):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def construct(self, x):
        return ours.softmax(x, self.dim)


@MODES
def test_what_an_attribute_may_be_does_not_depend_on_what_was_called_before(mode):
    """To a cache 1, 1.0 and True are one."""
    ms.set_context(mode=mode)
    x = tensors()[0]
    for _ in range(2):
        close(Axis(np.int64(1))(x), Axis(1)(x))
        for value in (1.0, True):
            with pytest.raises(TypeError, match=r"softmax: dim is "):
                Axis(value)(x)


def test_attributes_that_are_tensors_are_numbers():
    x = tensors()[0]
    close(ours.softmax(x, Tensor(0)), ops.softmax(x, 0))
    close(ours.layer_norm(x, 6, eps=Tensor(0.5, F32)), ours.layer_norm(x, 6, eps=0.5))
    with pytest.raises(TypeError, match=r"^conv2d: stride is "):
        ours.conv2d(x[None, None], x[None, None], stride=True)


@pytest.mark.parametrize("name", OPS)
def test_functions_are_pickled(name):
    function = getattr(ours, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_attributes_without_end_fill_no_memory():
    """A rate that is another one each step."""
    cache, x = differentiable, tensors()[0]
    bound = cache.cache_info().maxsize
    for i in range(bound + 8):
        ours.layer_norm(x, 6, eps=1.0 + i)
    assert cache.cache_info().currsize == bound


@MODES
def test_new_shapes_without_saying_so(mode):
    ms.set_context(mode=mode)
    _, w, b = tensors()
    cell = Ours()
    for rows in (1, 4, 2):
        x = Tensor(np.random.default_rng(rows).normal(size=(rows, 6)), F32)
        close(cell(x, w, b), Theirs()(x, w, b), 1e-4)


def test_no_shape_is_kept_from_the_first_call():
    """Attributes belong to a call: two shapes and two eps in one process."""
    x = Tensor(np.array([[1.0, 2.0, 4.0, 8.0]]), F32)
    seen = [ours.layer_norm(x, 4, eps=eps).asnumpy() for eps in (1e-5, 10.0, 1e-5)]
    assert np.array_equal(seen[0], seen[2])
    assert abs(seen[0] - seen[1]).max() > 0.1


def test_the_digits_of_eps():
    """MindSpore's own attributes are float32: eps arrives in double."""
    x, eps = np.array([[1.0, 2.0, 4.0]]), 0.1 + 2.0**-40
    expected = (x - x.mean()) / np.sqrt(x.var() + eps)
    assert abs(ours.layer_norm(Tensor(x), 3, eps=eps).asnumpy() - expected).max() < 1e-15


@MODES
def test_views(mode):
    ms.set_context(mode=mode)
    x = Tensor(np.random.default_rng(0).normal(size=(6, 8)), F32)

    def function(t):
        return ours.gelu(t.T) + ours.gelu(t.T[:, :])

    close(function(x), 2 * ops.gelu(x, approximate="none").T)
    close(ours.gelu(x[:, 1::2]), ops.gelu(x, approximate="none")[:, 1::2])


def test_vmap():
    x = Tensor(np.random.default_rng(0).normal(size=(3, 4, 6)), F32)

    def function(t):
        return ours.gelu(t)

    close(ms.vmap(function)(x), ops.gelu(x, approximate="none"))


# ------------------------------------------------------------------------------------------------------------- modules

LAYER_NORMS = [
    (((6,),), {}),
    (((4, 6),), {"begin_norm_axis": 1, "begin_params_axis": 1}),
    (((6,),), {"epsilon": 0.1}),
    (((6,),), {"gamma_init": "zeros", "beta_init": "ones"}),
    (((6,), -1, -1, "ones", "zeros", 1e-3, ms.float16), {}),
]


@MODES
@pytest.mark.parametrize(("args", "kwargs"), LAYER_NORMS, ids=str)
def test_layer_norm_cell_is_mindspores(mode, args, kwargs):
    ms.set_context(mode=mode)
    theirs, mine = nn.LayerNorm(*args, **kwargs), ours.LayerNorm(*args, **kwargs)
    names = [p.name for p in mine.get_parameters()]
    assert names == [p.name for p in theirs.get_parameters()]
    random = np.random.default_rng(0)
    for p in theirs.get_parameters():
        p.set_data(Tensor(random.normal(size=p.shape), p.dtype))
    assert not ms.load_param_into_net(mine, theirs.parameters_dict())[0]
    dtype = mine.gamma.dtype
    x = Tensor(random.normal(size=(3, 4, 6)), dtype)
    tolerance = 1e-2 if dtype == ms.float16 else 2e-5
    close(mine(x), theirs(x), tolerance)
    gradients = []
    for cell in (mine, theirs):
        weights = list(cell.get_parameters())
        gradients.append(ms.value_and_grad(Loss(cell), 0, weights)(x)[1])
    tolerance = 0.05 if dtype == ms.float16 else 1e-3
    close(gradients[0][0], gradients[1][0], tolerance)
    for a, b in zip(gradients[0][1], gradients[1][1], strict=True):
        close(a, b, tolerance * 4)
    again = nn.LayerNorm(*args, **kwargs)
    assert not ms.load_param_into_net(again, mine.parameters_dict())[0]


CONVOLUTIONS = [
    {},
    {"has_bias": True, "pad_mode": "pad", "padding": (1, 1, 2, 2)},
    {"stride": 2, "group": 2, "pad_mode": "valid"},
    {"dilation": 2},
    {"stride": 2},  # what it adds on each side is not the same
    {"has_bias": True, "pad_mode": "pad", "padding": (0, 1, 2, 2)},
]


@MODES
@pytest.mark.parametrize("kwargs", CONVOLUTIONS, ids=str)
def test_conv2d_cell_is_mindspores(mode, kwargs):
    ms.set_context(mode=mode)
    theirs, mine = nn.Conv2d(4, 6, 3, **kwargs), ours.Conv2d(4, 6, 3, **kwargs)
    assert not ms.load_param_into_net(mine, theirs.parameters_dict())[0]
    x = Tensor(np.random.default_rng(0).normal(size=(2, 4, 8, 6)), F32)
    close(mine(x), theirs(x))
    gradients = [ms.value_and_grad(Loss(cell), 0, list(cell.get_parameters()))(x)[1] for cell in (mine, theirs)]
    close(gradients[0][0], gradients[1][0], 1e-3)
    for a, b in zip(gradients[0][1], gradients[1][1], strict=True):
        close(a, b, 1e-3)


class RMSNormAsWritten(nn.Cell):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def construct(self, x):
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 0.1) * self.gamma


@MODES
def test_rms_norm_cell(mode):
    ms.set_context(mode=mode)
    cell = ours.RMSNorm(6, eps=0.1)
    (weight,) = cell.get_parameters()
    weight.set_data(tensors()[1])
    x, expected = tensors()[0], RMSNormAsWritten(tensors()[1])
    close(cell(x), expected(x))
    close(ms.grad(Loss(cell))(x), ms.grad(Loss(expected))(x), 1e-3)
    assert not list(ours.RMSNorm(6, elementwise_affine=False).get_parameters())


@MODES
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_cell_is_mindspores(mode, has_bias):
    ms.set_context(mode=mode)
    theirs, mine = nn.Dense(6, 5, has_bias=has_bias), ours.Linear(6, 5, has_bias=has_bias)
    assert not ms.load_param_into_net(mine, theirs.parameters_dict())[0]
    x = tensors()[0]
    close(mine(x), theirs(x))
    close(ms.grad(Loss(mine))(x), ms.grad(Loss(theirs))(x), 1e-3)
    activated = ours.Linear(6, 5, has_bias=has_bias, activation="relu")
    ms.load_param_into_net(activated, theirs.parameters_dict())
    close(activated(x), ops.relu(theirs(x)))


@MODES
@pytest.mark.parametrize("args", [(), (True,), (False,)], ids=str)
def test_gelu_cell_is_mindspores(mode, args):
    ms.set_context(mode=mode)
    x = tensors()[0]
    close(ours.GELU(*args)(x), nn.GELU(*args)(x))


@MODES
@pytest.mark.parametrize("args", [(), (0,)], ids=str)
def test_softmax_cell_is_mindspores(mode, args):
    ms.set_context(mode=mode)
    x = tensors()[0]
    close(ours.Softmax(*args)(x), nn.Softmax(*args)(x))
    close(ms.grad(Loss(ours.Softmax(*args)))(x), ms.grad(Loss(nn.Softmax(*args)))(x), 1e-3)


CROSS_ENTROPIES = [{}, {"reduction": "sum", "ignore_index": 2}, {"reduction": "none", "label_smoothing": 0.1}]


@MODES
@pytest.mark.parametrize("kwargs", CROSS_ENTROPIES, ids=str)
def test_cross_entropy_cell_is_mindspores(mode, kwargs):
    ms.set_context(mode=mode)
    x, labels = Tensor(np.random.default_rng(0).normal(size=(5, 6)), F32), Tensor([0, 5, 2, 2, 3], ms.int32)
    mine, theirs = ours.CrossEntropyLoss(**kwargs), nn.CrossEntropyLoss(**kwargs)
    close(mine(x, labels), theirs(x, labels))
    close(ms.grad(mine)(x, labels), ms.grad(theirs)(x, labels), 1e-4)


@MODES
def test_cross_entropy_cell_leaves_the_rest_to_mindspore(mode):
    ms.set_context(mode=mode)
    random = np.random.default_rng(0)
    x, shares = Tensor(random.normal(size=(5, 6)), F32), Tensor(random.dirichlet(np.ones(6), 5), F32)
    labels, weight = Tensor([0, 5, 2, 2, 3], ms.int32), Tensor(random.uniform(0.5, 2, size=6), F32)
    close(ours.CrossEntropyLoss()(x, shares), nn.CrossEntropyLoss()(x, shares))
    weight = ms.Parameter(weight, name="weight")
    close(ours.CrossEntropyLoss(weight)(x, labels), nn.CrossEntropyLoss(weight)(x, labels))


@MODES
@pytest.mark.parametrize("dtype", [ms.float32, ms.float16], ids=str)
def test_cross_entropy_cell_with_class_weights(mode, dtype):
    ms.set_context(mode=mode)
    random = np.random.default_rng(0)
    x, weight = Tensor(random.normal(size=(5, 6)), F32), Tensor(random.uniform(0.5, 2, size=6), dtype)
    labels = Tensor([0, 5, 2, 2, 3], ms.int32)
    mine = ours.CrossEntropyLoss(weight, 2, label_smoothing=0.1)
    theirs = nn.CrossEntropyLoss(weight.astype(F32), 2, label_smoothing=0.1)
    close(mine(x, labels), theirs(x, labels))
    close(ms.grad(mine)(x, labels), ms.grad(theirs)(x, labels), 1e-4)


@MODES
def test_a_model_trains_as_mindspores(mode):
    ms.set_context(mode=mode)
    random = np.random.default_rng(0)
    x, target = Tensor(random.normal(size=(16, 5)), F32), Tensor(random.normal(size=(16, 1)), F32)
    first, last = random.normal(size=(8, 5)) * 0.4, random.normal(size=(1, 8)) * 0.4
    curves = []
    for kinds in ((ours.LayerNorm, ours.GELU), (nn.LayerNorm, nn.GELU)):
        ends = nn.Dense(5, 8, Tensor(first, F32)), nn.Dense(8, 1, Tensor(last, F32))
        model = nn.SequentialCell(ends[0], kinds[0]((8,)), kinds[1](False), ends[1])
        for p in model.get_parameters():
            if "bias" in p.name:
                p.set_data(ops.zeros_like(p))
        optimizer = nn.SGD(model.trainable_params(), 0.1)
        forward = nn.WithLossCell(model, nn.MSELoss())
        step = nn.TrainOneStepCell(forward, optimizer)
        curves.append([float(step(x, target).asnumpy()) for _ in range(20)])
    assert curves[0][-1] < 0.7 * curves[0][0]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)


def test_cells_are_copied():
    model = nn.SequentialCell(nn.Dense(6, 6), ours.LayerNorm((6,)), ours.GELU())
    x = tensors()[0]
    other = copy.deepcopy(model)
    close(other(x), model(x))
    other[1].gamma.set_data(ops.zeros_like(other[1].gamma))
    assert np.abs(model(x).asnumpy() - other(x).asnumpy()).max() > 0.01


@MODES
def test_the_parameters_of_a_frozen_cell(mode):
    """A weight that wants no gradient gets none, and x's is right all the same."""
    ms.set_context(mode=mode)
    cell = ours.LayerNorm((6,))
    for p in cell.get_parameters():
        p.requires_grad = False
    assert not cell.trainable_params()
    x = tensors()[0]
    close(ms.grad(Loss(cell))(x), ms.grad(Loss(nn.LayerNorm((6,))))(x), 1e-3)


@MODES
def test_errors_of_graphs_name_the_operator(mode):
    ms.set_context(mode=mode)
    x, w, b = tensors()

    class Wrong(nn.Cell):
        def construct(self, x, w):
            return ours.layer_norm(x, (7,), w)

    with pytest.raises(ValueError, match=r"layer_norm: x has shape \(4, 6\)"):
        Wrong()(x, w)
    close(Ours()(x, w, b), Theirs()(x, w, b))


class LltmAsWritten(nn.Cell):
    def __init__(self, weights, bias):
        super().__init__()
        self.weights, self.bias = weights, bias

    def construct(self, input, state):
        i, o, c = ops.split(ops.matmul(ops.cat((state[0], input), -1), self.weights.T) + self.bias, 5, -1)
        new_cell = state[1] + ops.elu(c) * ops.sigmoid(i)
        return ops.tanh(new_cell) * ops.sigmoid(o), new_cell


class LltmLoss(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h, c):
        new_h, new_cell = self.cell(x, (h, c))
        return ops.sin(new_h).sum() + (new_cell * new_cell).sum()


@MODES
def test_lltm_cell_is_the_tutorials(mode):
    ms.set_context(mode=mode)
    cell = ours.LLTM(6, 5)
    weights, bias = cell.get_parameters()
    assert (weights.name, weights.shape, bias.name, bias.shape) == ("weights", (15, 11), "bias", (1, 15))
    assert 0.9 < abs(weights.asnumpy()).max() * 5**0.5 <= 1
    random = np.random.default_rng(0)
    x, h, c = (Tensor(random.normal(size=(4, n)), F32) for n in (6, 5, 5))
    theirs = LltmAsWritten(Tensor(weights), Tensor(bias))
    for a, b in zip(cell(x, (h, c)), theirs(x, (h, c)), strict=True):
        close(a, b, 1e-4)
    mine = ms.grad(LltmLoss(cell), (0, 1, 2), [weights, bias])(x, h, c)
    for a, b in zip(mine[0], ms.grad(LltmLoss(theirs), (0, 1, 2))(x, h, c), strict=True):
        close(a, b, 1e-3)
    assert all(np.abs(g.asnumpy()).sum() > 0 for g in mine[1])


@pytest.mark.parametrize("shape", [(15,), (1, 15)], ids=str)
def test_lltm_cell_loads_the_tutorials_state(shape):
    """Alone and within another cell. Its bias is (3 * state,) in the tutorial's text, (1, 3 * state) in its code."""
    random = np.random.default_rng(0)
    alone, within = ours.LLTM(6, 5), nn.SequentialCell(ours.GELU(), ours.LLTM(6, 5))
    state = {name: Tensor(random.normal(size=s), F32) for name, s in (("weights", (15, 11)), ("bias", shape))}
    alone.load_state_dict(state)
    within.load_state_dict({f"1.{name}": value for name, value in state.items()})
    assert state["bias"].shape == shape
    x, h, c = (Tensor(random.normal(size=(4, n)), F32) for n in (6, 5, 5))
    expected = LltmAsWritten(state["weights"], state["bias"])(x, (h, c))
    for cell in (alone, within[1]):
        assert [p.shape for p in cell.get_parameters()] == [(15, 11), (1, 15)]
        for a, b in zip(cell(x, (h, c)), expected, strict=True):
            close(a, b, 1e-4)


@pytest.mark.parametrize("shape", [(14,), (3, 5), (15, 1)], ids=str)
def test_lltm_cell_refuses_another_bias(shape):
    cell = ours.LLTM(6, 5)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        cell.load_state_dict(cell.state_dict() | {"bias": Tensor(np.zeros(shape), F32)})


class Scaled(nn.Cell):
    def construct(self, x):
        return ours.add(ours.add(x * x, x, 0.1), 0.7, -3) * x


class ScaledByMindSpore(nn.Cell):
    def construct(self, x):
        return (x * x + x * 0.1 - 3 * 0.7) * x


class Added(nn.Cell):
    def __init__(self, b, alpha):
        super().__init__()
        self.b, self.alpha = b, alpha

    def construct(self, x):
        return ours.add(x, self.b, self.alpha)


class AddedTo(Added):
    def construct(self, x):
        return ours.add(self.b, x, self.alpha)


@MODES
def test_add_takes_alpha_and_a_number(mode):
    """Differentiated as often as one likes; float64 keeps the digits of a number."""
    ms.set_context(mode=mode)
    x, mine, theirs = tensors()[0], Scaled(), ScaledByMindSpore()
    for _ in range(3):
        close(mine(x), theirs(x))
        mine, theirs = Gradient(mine), Gradient(theirs)
    one, other = Tensor(np.ones(3)), Tensor(np.ones(3))  # to PyNative's gradient one tensor is one variable
    for got, expected in (
        (Added(0.1, 1)(one), 1.1),
        (Added(0.1, 3)(one), 1 + 3 * 0.1),
        (Added(True, 3)(one), 4.0),
        (AddedTo(other, 0.1)(one), 1.1),
        (Gradient(AddedTo(other, 0.1))(one), 0.1),
    ):
        np.testing.assert_allclose(got.asnumpy(), np.full(3, expected), rtol=1e-15)


# ------------------------------------------------------------------------------------ MindSpore's ways to train and run


class Classifier(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.out = ours.Linear(4, 8, activation="gelu"), ours.LayerNorm((8,)), ours.Linear(8, 3)

    def construct(self, x):
        return self.out(self.norm(self.dense(x)))


class Losses(Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def step_end(self, run_context):
        self.seen.append(float(run_context.original_args().net_outputs.asnumpy()))


LEVELS = [("O0", ms.PYNATIVE_MODE), ("O1", ms.GRAPH_MODE), ("O1", ms.PYNATIVE_MODE), ("O2", ms.PYNATIVE_MODE),
          ("O3", ms.PYNATIVE_MODE), ("auto", ms.PYNATIVE_MODE)]  # fmt: skip


@pytest.mark.parametrize(("level", "mode"), LEVELS)
def test_model_trains_with_callbacks_at_each_level_of_mixed_precision(level, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # level O1 writes there
    ms.set_context(mode=mode)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    data = NumpySlicesDataset((x, (x.sum(1) > 0).astype(np.int32)), ["x", "label"], shuffle=False).batch(8)
    net, losses = Classifier(), Losses()
    options = {} if level == "O0" else {"amp_level": level, "loss_scale_manager": None}
    model = Model(net, ours.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 0.05), metrics={"acc"}, **options)
    saved = ModelCheckpoint("model", str(tmp_path), CheckpointConfig(save_checkpoint_steps=4))
    model.train(4, data, callbacks=[losses, LossMonitor(4), saved], dataset_sink_mode=False)
    assert losses.seen[-1] < 0.5 * losses.seen[0]
    assert model.eval(data, dataset_sink_mode=False)["acc"] > 0.8
    ms.set_context(mode=ms.PYNATIVE_MODE)
    again = Classifier()
    assert not ms.load_param_into_net(again, ms.load_checkpoint(str(tmp_path / "model-4_4.ckpt")))[0]
    trained = [p.asnumpy() for p in net.get_parameters()]
    for a, b in zip(trained, again.get_parameters(), strict=True):
        np.testing.assert_array_equal(a, b.asnumpy())


LOAD = """
import sys
import mindspore as ms
import numpy as np
x, y = np.load("x.npy"), np.load("y.npy")
run = ms.nn.GraphCell(ms.load("net.mindir"))
for times in (1, 3):
    got = run(ms.Tensor(np.tile(x, (times, 1)))).asnumpy()
    np.testing.assert_allclose(got, np.tile(y, (times, 1)), rtol=1e-5)
assert "aotops" not in sys.modules
"""


def test_mindir_is_loaded_by_a_process_without_this_package(tmp_path):
    """With an open number of rows. The file has the library's path."""
    net, x = Classifier(), tensors()[0].asnumpy()[:, :4]
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", net(Tensor(x)).asnumpy())
    ms.export(net, Tensor(shape=(None, 4), dtype=F32), file_name=str(tmp_path / "net"), file_format="MINDIR")
    assert str(BUILTIN.path).encode() in (tmp_path / "net.mindir").read_bytes()
    subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, check=True, timeout=300)


@MODES
def test_registered_primitives(mode):
    ms.set_context(mode=mode)
    x, w, b = tensors()
    gelu, norm = ours.registered("gelu", x, "tanh"), ours.registered("layer_norm", x, 6, w, b)

    class Net(nn.Cell):
        def construct(self, x, w, b):
            return norm(gelu(x), w, b)[0]

    class Functions(nn.Cell):
        def construct(self, x, w, b):
            return ours.layer_norm(ours.gelu(x, "tanh"), 6, w, b)

    close(Net()(x, w, b), Functions()(x, w, b))
    for got, expected in zip(
        ms.grad(Loss(Net()), (0, 1))(x, w, b), ms.grad(Loss(Functions()), (0, 1))(x, w, b), strict=True
    ):
        close(got, expected)
    assert gelu(x.astype(ms.float16)).dtype == ms.float16
    with pytest.raises(TypeError, match=r"Custom_aot_gelu_\w+.*\n*.*Unsupported data type"):
        gelu(x.astype(ms.int32)).asnumpy()


def test_what_cannot_be_registered_is_refused():
    x, w, _ = tensors()
    with pytest.raises(NotImplementedError, match="add: tensors of different shapes"):
        ours.registered("add", x, w)
