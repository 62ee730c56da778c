"""The structs of cuda_src/host/torch.cpp, which call.py fills."""

from __future__ import annotations

from ctypes import Structure, c_bool, c_char, c_int, c_int64, c_uint64, c_void_p

from aotops.call import MOST_SLOTS

Slots = c_int * MOST_SLOTS
_Parameters = MOST_SLOTS * 2


class GateFacts(Structure):
    """Facts of this torch for cuda_src/host/gate.h; gate.py fills it."""

    _fields_ = [
        ("tensor_keys", c_uint64 * 4), ("autocast_keys", c_uint64), ("inference", c_uint64 * 2),
        ("impl_offset", c_int64), ("key_offset", c_int64), ("forward_ad", c_void_p), ("level", c_void_p),
        ("no_level", c_void_p),
    ]  # fmt: skip


class Torch(Structure):
    _fields_ = [
        ("exchange", c_void_p), ("types", c_void_p * 2), ("size_type", c_void_p), ("empty_like", c_void_p),
        ("gate", GateFacts),
    ]  # fmt: skip


class Function(Structure):
    _fields_ = [
        ("call", c_void_p), ("prototype", Slots), ("has_prototypes", c_bool), ("equal", Slots), ("always", c_uint64),
        ("residuals", c_uint64), ("scratch", c_uint64), ("keep_from", c_int64), ("n_returned", c_int),
        ("n_saved", c_int), ("saved", Slots), ("instead", Slots), ("saved_for", c_uint64 * MOST_SLOTS),
        ("channels_last", c_uint64), ("none_for_unread", c_bool), ("hooks", c_void_p), ("make_prototypes", c_void_p),
        ("prototypes", c_void_p),
    ]  # fmt: skip


class Backward(Structure):
    _fields_ = [
        ("function", c_void_p), ("n_grads", c_int), ("n_inputs", c_int), ("source", Slots), ("gradient", Slots),
        ("fallback", c_void_p), ("over_output", c_int), ("over_input", c_int), ("over_from", c_int64),
        ("may_overwrite", c_void_p), ("drop_inputs", c_void_p),
    ]  # fmt: skip


class Differentiable(Structure):
    _fields_ = [("function", c_void_p), ("apply", c_void_p), ("last_use", c_uint64)]


class Compiled(Structure):
    _fields_ = [("function", c_void_p), ("fallback", c_void_p)]


class Public(Structure):
    _fields_ = [
        ("n_inputs", c_int), ("n_attrs", c_int), ("n_parameters", c_int), ("position", c_int * _Parameters),
        ("names", c_void_p * _Parameters), ("defaults", c_void_p * _Parameters), ("n_transposable", c_int),
        ("transposable", Slots), ("transposes", Slots), ("kinds", c_char * _Parameters), ("images", c_uint64),
        ("layout", c_int), ("most_axes", c_int), ("first_layout", c_void_p), ("last_layout", c_void_p),
        ("copies", c_char), ("channels_last", c_void_p), ("cast", c_void_p), ("constants", c_uint64),
        ("most_bound", c_int), ("clock", c_uint64), ("bind", c_void_p), ("bound", c_void_p),
        ("last_attrs", c_void_p), ("last", c_void_p), ("record", c_void_p), ("fallback", c_void_p),
    ]  # fmt: skip


class Module(Structure):
    _fields_ = [
        ("function", c_void_p), ("type", c_void_p), ("sources", c_char * _Parameters),
        ("values", c_void_p * _Parameters), ("widens", c_bool), ("wide_in_autocast", c_bool),
        ("reads_contiguous", c_bool), ("device", c_int), ("elements", c_int64), ("rows", c_int64),
        ("product_bits", c_int), ("uneven_weight", c_int64), ("fewest_rows", c_int64),
        ("image_bits", c_int), ("few_channels", c_int64),
        ("held_name", c_void_p), ("held", c_void_p), ("last_size", c_int64), ("last_int", c_void_p),
    ]  # fmt: skip


class ModuleCall(Structure):
    _fields_ = [
        ("module", c_void_p), ("original", c_void_p), ("ways", c_void_p * 2), ("forward", c_void_p),
        ("replaced", c_void_p), ("hooks", c_void_p * 4),
    ]  # fmt: skip


ALL = (GateFacts, Torch, Function, Backward, Differentiable, Compiled, Public, Module, ModuleCall)
