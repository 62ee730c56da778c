"""One operator in five frameworks: the same function, the same result, the same gradient with respect to x.

Uses the frameworks that are installed. README.md shows the functions.
"""

from importlib.util import find_spec

import numpy as np

x = np.array([[1, 2, 3, 6]], "float32")
dy = np.array([[1, 0, 0, 0]], "float32")  # the gradient of the first element of the result


def with_numpy():
    from aotops.frontends import numpy as F

    y = F.layer_norm(x, 4)
    dx, _, _ = F.layer_norm_backward(dy, x, 4)
    return y, dx


def with_cupy():
    import cupy as cp

    from aotops.frontends import cupy as F

    y = F.layer_norm(cp.array(x), 4)
    dx, _, _ = F.layer_norm_backward(cp.array(dy), cp.array(x), 4)
    return y.get(), dx.get()


def with_torch():
    import torch

    from aotops.frontends import torch as F

    t = torch.tensor(x, requires_grad=True)
    y = F.layer_norm(t, 4)
    y[0, 0].backward()
    return y.detach().numpy(), t.grad.numpy()


def with_jax():
    import jax

    from aotops.frontends import jax as F

    y = F.layer_norm(x, 4)
    dx = jax.grad(lambda x: F.layer_norm(x, 4)[0, 0])(x)
    return y, dx


def with_mindspore():
    import mindspore as ms

    from aotops.frontends import mindspore as F

    def first(t):
        return F.layer_norm(t, 4)[0, 0]

    y = F.layer_norm(ms.Tensor(x), 4)
    dx = ms.grad(first)(ms.Tensor(x))
    return y.asnumpy(), dx.asnumpy()


if __name__ == "__main__":
    for example in (with_numpy, with_cupy, with_torch, with_jax, with_mindspore):
        framework = example.__name__.removeprefix("with_")
        if not find_spec(framework):
            print(f"{framework:10} not installed here")
            continue
        y, dx = (np.array2string(np.asarray(a), precision=4) for a in example())
        print(f"{framework:10} y {y}   dx {dx}")
