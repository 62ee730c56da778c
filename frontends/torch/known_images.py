"""Modules of networks of images with a batch norm and what follows it, known as the modules of known_modules.py are."""

from __future__ import annotations

from torch.nn import functional as F

from . import private
from .known_modules import form

_assert = private.assertion


@form("batch_norm", layer="activated")
def _timm_batch_norm(self, x):
    _assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
    if self.momentum is None:  # noqa: SIM108
        exponential_average_factor = 0.0
    else:
        exponential_average_factor = self.momentum
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # noqa: SIM108
            exponential_average_factor = 1.0 / float(self.num_batches_tracked)
        else:
            exponential_average_factor = self.momentum
    if self.training:  # noqa: SIM108
        bn_training = True
    else:
        bn_training = (self.running_mean is None) and (self.running_var is None)
    x = F.batch_norm(
        x,
        self.running_mean if not self.training or self.track_running_stats else None,
        self.running_var if not self.training or self.track_running_stats else None,
        self.weight,
        self.bias,
        bn_training,
        exponential_average_factor,
        self.eps,
    )
    x = self.DROPOUT(x)
    x = self.ACT(x)
    return x


# ------------------------------------------------------------------------------------------------- blocks of a residual


@form("batch_norm", layer="basic")
def _torchvision_basic(self, x):
    identity = x
    out = self.CONV(x)
    out = self.NORM(out)
    out = self.ACT(out)
    out = self.CONV_2(out)
    out = self.NORM_2(out)
    if self.SHORTCUT is not None:
        identity = self.SHORTCUT(x)
    out += identity
    out = self.ACT(out)
    return out


@form("batch_norm", layer="bottleneck")
def _torchvision_bottleneck(self, x):
    identity = x
    out = self.CONV(x)
    out = self.NORM(out)
    out = self.ACT(out)
    out = self.CONV_2(out)
    out = self.NORM_2(out)
    out = self.ACT(out)
    out = self.CONV_3(out)
    out = self.NORM_3(out)
    if self.SHORTCUT is not None:
        identity = self.SHORTCUT(x)
    out += identity
    out = self.ACT(out)
    return out


@form("batch_norm", layer="timm_basic")
def _timm_basic(self, x):
    shortcut = x
    x = self.CONV(x)
    x = self.NORM(x)
    x = self.DROPOUT(x)
    x = self.ACT(x)
    x = self.BLUR(x)
    x = self.CONV_2(x)
    x = self.NORM_2(x)
    if self.GATE is not None:
        x = self.GATE(x)
    if self.PATH is not None:
        x = self.PATH(x)
    if self.SHORTCUT is not None:
        shortcut = self.SHORTCUT(shortcut)
    x += shortcut
    x = self.ACT_2(x)
    return x


@form("batch_norm", layer="timm_bottleneck")
def _timm_bottleneck(self, x):
    shortcut = x
    x = self.CONV(x)
    x = self.NORM(x)
    x = self.ACT(x)
    x = self.CONV_2(x)
    x = self.NORM_2(x)
    x = self.DROPOUT(x)
    x = self.ACT_2(x)
    x = self.BLUR(x)
    x = self.CONV_3(x)
    x = self.NORM_3(x)
    if self.GATE is not None:
        x = self.GATE(x)
    if self.PATH is not None:
        x = self.PATH(x)
    if self.SHORTCUT is not None:
        shortcut = self.SHORTCUT(shortcut)
    x += shortcut
    x = self.ACT_3(x)
    return x
