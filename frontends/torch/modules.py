"""torch.nn's modules on the library's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import accumulation, batch_norms
from . import functional as F
from .attributes import Classes, has_own
from .precision import convolutions_allow_tf32

_AFFINE = Classes("weight", "bias")


def _affine(module: Any) -> tuple[Any, Any]:
    """The weight and the bias."""
    if has_own(module, _AFFINE):
        own = module._parameters
        try:
            return own["weight"], own["bias"]
        except KeyError:  # deleted: torch says so
            pass
    return module.weight, module.bias


class _Offset:
    """``weight_offset`` of a norm's module: what is added to its weight, whose initial value is 1 - weight_offset. If
    there is no weight (elementwise_affine=False), it has no effect: the module computes what a new one with a weight
    does."""

    weight_offset = 0.0

    def __init__(self, *args: Any, weight_offset: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_offset = float(weight_offset)
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if self.weight_offset and self.weight is not None:  # type: ignore[attr-defined]
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset  # type: ignore[misc]


class LayerNorm(_Offset, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the library's kernel: the same arguments, parameters and state, and the keyword
    ``weight_offset``, which is added to the weight; the initial weight is 1 - weight_offset. Parameters in float32
    serve inputs of 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, *_affine(self), self.eps, self.weight_offset)


class RMSNorm(_Offset, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on the library's kernel: the same arguments, parameters and state, and the keyword
    ``weight_offset``, which is added to the weight; the initial weight is 1 - weight_offset. Parameters in float32
    serve inputs of 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        affine = self.weight, self.eps, self.weight_offset
        return F.rms_norm(input, self.normalized_shape, *affine)


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on the library's kernel: the same arguments, parameters and state, and an activation that is
    applied in the same kernel: None, "relu", "gelu", "gelu_tanh" or "silu". With ``accumulate_into_main_grad``, a
    backward adds the gradient of a weight that has a ``main_grad`` to it, in float32, inside the product."""

    accumulate_into_main_grad = False

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        activation=None,
        accumulate_into_main_grad=False,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        if accumulate_into_main_grad:
            self.accumulate_into_main_grad = True

    def forward(self, input: Tensor) -> Tensor:
        if self.accumulate_into_main_grad and torch.is_grad_enabled() and accumulation.has_main_grad(self.weight):
            return accumulation.linear(input, self.weight, self.bias, self.activation)
        return F.linear(input, *_affine(self), self.activation)

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        accumulates = ", accumulate_into_main_grad=True" if self.accumulate_into_main_grad else ""
        return super().extra_repr() + activation + accumulates


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` on the library's kernel: the same argument."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate)


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on the library's kernel: the same argument."""

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None:  # torch warns, and chooses an axis
            return super().forward(input)
        return F.softmax(input, self.dim)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on the library's kernel: the same arguments."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        options = self.ignore_index, self.reduction, self.label_smoothing
        return F.cross_entropy(input, target, *options, weight=self.weight)


class LinearCrossEntropyLoss(torch.nn.Linear):
    """The head of a model and its loss, ``CrossEntropyLoss(...)(Linear(in_features, num_classes)(input), target)``,
    without the logits (``linear_cross_entropy``): the parameters and state of ``torch.nn.Linear``, and the arguments of
    CrossEntropyLoss, z_loss and softcap. ``weight`` is that of the head; the argument, of the classes, is the buffer
    ``class_weight``, which the state does not have."""

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        moved = weight if weight is None else weight.detach().to(self.weight.device)
        self.register_buffer("class_weight", moved, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        options = self.ignore_index, self.reduction, self.label_smoothing
        more = {"class_weight": self.class_weight, "z_loss": self.z_loss, "softcap": self.softcap}
        return F.linear_cross_entropy(input, self.weight, target, self.bias, *options, **more)

    def logits(self, input: Tensor) -> Tensor:
        """The logits, without ``softcap``, for generation."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        names = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")
        return f"{super().extra_repr()}, {', '.join(f'{name}={getattr(self, name)}' for name in names)}"


class LLTM(torch.nn.Module):
    """The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions" on the library's kernel: the same arguments and
    parameters, and device and dtype. ``forward(input, (old_h, old_cell))`` returns new_h and new_cell.

    ``bias`` is (1, 3 * state_size), as in the code that comes with the tutorial. A state_dict whose bias is
    (3 * state_size,), as in the tutorial's text, is loaded too.
    """

    def __init__(self, input_features: int, state_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.input_features, self.state_size = input_features, state_size
        gates, features = 3 * state_size, state_size + input_features
        self.weights = torch.nn.Parameter(torch.empty(gates, features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, gates, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.state_size**-0.5
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.lltm(input, self.weights, self.bias, *state)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        bias = state_dict.get(f"{prefix}bias")
        if isinstance(bias, Tensor) and bias.shape == (3 * self.state_size,):
            state_dict[f"{prefix}bias"] = bias[None]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"input_features={self.input_features}, state_size={self.state_size}"


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on the library's kernel: the same arguments, parameters and state; channels_last tensors stay
    so, and TF32 is used where torch allows it (``torch.backends.cudnn``). With another padding_mode than zeros it calls
    torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros":
            return super().forward(input)
        weight, bias = _affine(self)
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(input, weight, bias, *options, allow_tf32=convolutions_allow_tf32())


class _BatchNorm:
    """A module of torch.nn's batch norms on the library's kernel."""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        if activation not in (None, "relu", "silu", "hardswish"):
            expected = "None, 'relu', 'silu' or 'hardswish'"
            raise ValueError(f"{type(self).__name__}: activation is {activation!r}, expected {expected}")
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)  # type: ignore[attr-defined]
        # Inductor fuses torch's with its neighbours: ResNet-50's kernels of 12 ms with ours compiled take 10 so.
        is_fused = input.is_cuda and torch.compiler.is_compiling()
        state = batch_norms.state_of(self)
        y = None if is_fused else batch_norms.normalized(self, state, input, residual, self.activation)
        return self._torchs(input, residual) if y is None else y

    def _torchs(self, input: Tensor, residual: Tensor | None) -> Tensor:
        y = super().forward(input)  # type: ignore[misc]
        y = y if residual is None else y + residual
        return batch_norms.activated(y, self.activation)

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        return super().extra_repr() + activation  # type: ignore[misc]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` on the library's kernel: see ``BatchNorm2d``."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` on the library's kernel: the same arguments, parameters and state; channels_last tensors
    stay so. ``forward(input, residual=None)`` adds a residual, and ``activation`` is None, "relu", "silu" or
    "hardswish". The residual and a ReLU, or an activation without one, are in the same kernel. With running statistics
    (after ``eval()``), and compiled for a GPU, it calls torch's own. What makes another module of its parameters, as
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, knows no activation."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` on the library's kernel: see ``BatchNorm2d``."""
