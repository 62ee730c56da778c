"""The seed of one call of drop, int32 of shape (2,): 64 bits that the generator of a framework draws."""


def of_torch(device="cpu", generator=None):
    import torch

    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device, generator=generator)


def of_jax(key):
    import jax

    return jax.lax.bitcast_convert_type(jax.random.bits(key, (2,), "uint32"), "int32")


def of_mindspore():
    import mindspore as ms

    return ms.ops.randint(-(2**31), 2**31 - 1, (2,), dtype=ms.int32)
