"""Scaled dot-product attention."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator

# -------------------------------------------------------------------------------------------------------------- shapes


def _axes(call):
    """Which axes of q, k, v and y are the heads and the sequence."""
    return (-3, -2) if call.layout == "BHSD" else (-2, -3)


def _lse_shape(call):
    heads, seq = _axes(call)
    return (*call.q[:-3], call.q[heads], call.q[seq])


def _added_shape(slot):
    """The shape of the gradient of an input that may be absent."""

    def shape(call):
        added = getattr(call, slot)
        return (0,) if added is None else added

    return shape


def _flops(call):
    """The operations of all pairs of a query and a key, seen or not."""
    heads, seq = _axes(call)
    pairs = prod(call.q[:-3]) * call.q[heads] * call.q[seq] * call.k[seq]
    return 2 * pairs * (call.q[-1] + call.v[-1])


# ------------------------------------------------------------------------------------------------------------ sharding


def _dims(call):
    return _stated(call, " (e)")


def _backward_dims(call):
    stated = _stated(call)
    added = {f"d{slot}": "0" if getattr(call, slot) is None else stated[slot] for slot in ("bias", "sinks")}
    return stated | {f"d{slot}": stated[slot] for slot in ("q", "k", "v", "y")} | added


def _stated(call, of_lse=""):
    """Leading axes are independent; heads where each of k has one of q; queries where all see the same keys but for a
    mask; and the head_dim of v, along which the gradient of a score is a sum. With dropout, which depends on the place
    in the whole call, the head_dim of v alone. ``of_lse``: what follows its axes."""
    heads, seq = _axes(call)
    q_heads, kv_heads = ("h", "h") if call.q[heads] == call.k[heads] and not call.dropout else ("H", "K")
    s = "S" if call.dropout or call.causal or max(call.window) >= 0 or call.cu_seqlens is not None else "s"
    leading = call.q[:-3]
    scores = (*leading, call.q[heads], call.q[seq], call.k[seq])
    shared = {"lengths": leading, "mask": scores, "bias": scores}
    given = {slot: getattr(call, slot) for slot in shared if getattr(call, slot) is not None}
    named = max((len(given[slot]) - len(shared[slot]) + len(leading) for slot in given), default=0)
    named = len(leading) if call.dropout else named
    names = [f"{'B' if call.dropout else 'b'}{i}" for i in range(named, 0, -1)]
    lead = " ".join(names if call.dropout else ["...", *names])

    def rows(h, s, d):
        return f"{lead} {h} {s} {d}" if call.layout == "BHSD" else f"{lead} {s} {h} {d}"

    def broadcast(slot, names):
        """The axes of an input that is broadcast to axes of these names."""
        found, to = given.get(slot, ()), shared[slot]
        last = zip(found, names[len(names) - len(found) :], to[len(to) - len(found) :], strict=True)
        return " ".join(name if n == of else f"{name.upper()}1" for n, name, of in last)

    query, key, value = rows(q_heads, s, "D"), rows(kv_heads, "T", "D"), rows(kv_heads, "T", "e")
    axes = [*names, q_heads, s, "T"]
    return {
        **{"q": query, "k": key, "v": value, "y": rows(q_heads, s, "e"), "lse": f"{lead} {q_heads} {s}{of_lse}"},
        **{"lengths": broadcast("lengths", names), "mask": broadcast("mask", axes), "bias": broadcast("bias", axes)},
        **{"sinks": q_heads, "cu_seqlens": "N", "cu_seqlens_k": "N", "seed": "R"},
    }


# ------------------------------------------------------------------------------------------------------------ formulas

_INFINITY = float("inf")


def _formula(
    m, q, k, v, lengths, mask, bias, sinks, cu_seqlens, cu_seqlens_k, seed, causal, scale, window, softcap, layout,
    dropout,
):  # fmt: skip
    offsets = cu_seqlens, cu_seqlens_k
    call = _Call(m, q, k, v, lengths, mask, bias, sinks, offsets, causal, scale, window, softcap, layout)
    p, _, _ = call.probabilities()
    kept = call.kept(p, seed, dropout)
    return call.joined(call.matmul(p if kept is None else p * kept, call.v))


def _backward_formula(
    m, dy, q, k, v, lengths, mask, bias, sinks, cu_seqlens, cu_seqlens_k, seed, causal, scale, window, softcap, layout,
    dropout,
):  # fmt: skip
    """y and lse are functions of the inputs, and not read: the derivatives of these are whole without them."""
    offsets = cu_seqlens, cu_seqlens_k
    call = _Call(m, q, k, v, lengths, mask, bias, sinks, offsets, causal, scale, window, softcap, layout)
    p, slope, of_sink = call.probabilities()
    kept = call.kept(p, seed, dropout)
    dy = call.groups(dy)
    dp = call.matmul(dy, call.v, transpose_b=True)
    dp = dp if kept is None else dp * kept
    delta = m.sum(p * dp, (-1,), keepdims=True)
    dt = p * (dp - delta)
    ds = dt * slope
    dq = call.joined(call.matmul(ds, call.k))
    dropped = p if kept is None else p * kept
    dk, dv = (call.of_keys(call.matmul(a, b, transpose_a=True)) for a, b in ((ds, call.q), (dropped, dy)))
    nothing = m.reshape(dq[..., :0], (0,))
    dbias = nothing if bias is None else call.of_scores(dt, bias)
    dsinks = nothing if sinks is None else call.of_heads(m.zeros(delta) - of_sink * delta)
    return dq, dk, dv, dbias, dsinks


class _Call:
    """q as (..., kv_heads, heads / kv_heads, queries, head_dim), wide; k and v as (..., kv_heads, 1, keys, dim)."""

    def __init__(
        self, m, q, k, v, lengths, mask, bias, sinks, offsets, causal, scale, window, softcap, layout
    ):  # fmt: skip
        self.m, self.layout, self.softcap, self.lengths = m, layout, softcap, lengths
        self.offsets, self.key_offsets = offsets
        self.kv_heads = k.shape[-3 if layout == "BHSD" else -2]
        self.q, self.k, self.v = self.groups(q), self.shared(k), self.shared(v)
        self.mask, self.bias = (x if x is None else self.grouped(x) for x in (mask, bias))
        self.sinks = None if sinks is None else m.reshape(m.wide(sinks), (*self.two_axes(sinks.shape[0]), 1, 1))
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.left, self.right = window
        if causal:
            self.right = 0

    def heads_first(self, x):
        x = self.m.wide(x)
        return x if self.layout == "BHSD" else self.m.swapaxes(x, x.ndim - 3, x.ndim - 2)

    def groups(self, x):
        *lead, heads, seq, dim = (x := self.heads_first(x)).shape
        return self.m.reshape(x, (*lead, self.kv_heads, heads // self.kv_heads, seq, dim))

    def shared(self, x):
        *lead, heads, seq, dim = (x := self.heads_first(x)).shape
        return self.m.reshape(x, (*lead, heads, 1, seq, dim))

    def grouped(self, x):
        """What is broadcast to (..., heads, queries, keys), with two axes of heads and as many axes as the scores."""
        shape = (*(1,) * (self.q.ndim - 1 - x.ndim), *x.shape)
        *lead, heads, queries, keys = shape
        two = (1, 1) if heads == 1 else self.two_axes(heads)
        return self.m.reshape(x, (*lead, *two, queries, keys))

    def two_axes(self, heads):
        return self.kv_heads, heads // max(self.kv_heads, 1)

    def of_scores(self, x, bias):
        """``grouped`` undone, of the gradient of a bias: what it is broadcast to is summed."""
        found = self.grouped(bias).shape
        axes = tuple(i - x.ndim for i, n in enumerate(found) if n == 1 and x.shape[i] != 1)
        return self.m.reshape(self.m.sum(x, axes, keepdims=True), tuple(bias.shape))

    def of_heads(self, x):
        """The sums of each head, of numbers of queries: (heads,)."""
        axes = (*range(-x.ndim, -4), -2, -1)
        return self.m.reshape(self.m.sum(x, axes), (x.shape[-4] * x.shape[-3],))

    def joined(self, x):
        """``groups`` undone."""
        *lead, kv_heads, shared, seq, dim = x.shape
        x = self.m.reshape(x, (*lead, kv_heads * shared, seq, dim))
        return x if self.layout == "BHSD" else self.m.swapaxes(x, x.ndim - 3, x.ndim - 2)

    def of_keys(self, x):
        """``shared`` undone, of the sums over the queries' heads."""
        x = self.m.sum(x, (-3,))
        return x if self.layout == "BHSD" else self.m.swapaxes(x, x.ndim - 3, x.ndim - 2)

    def matmul(self, a, b, transpose_a=False, transpose_b=False):
        return self.m.ops.matmul(a, b, transpose_a, transpose_b)

    def probabilities(self):
        """The probability of each key for each query, 0 where it is not seen; the slope of the exponent; and the
        probability of the sink."""
        m = self.m
        scores, slope = self.matmul(self.q, self.k, transpose_b=True) * self.scale, self.scale
        if self.softcap:
            t = m.tanh(scores / self.softcap)
            scores, slope = t * self.softcap, (1 - t * t) * self.scale
        if self.bias is not None:
            bias = m.wide(self.bias)
            scores = scores + m.where(bias > -_INFINITY, bias, m.zeros(bias))
        if not scores.shape[-1] and self.sinks is None:
            return scores, slope, None
        seen = self._where_seen(scores, m.zeros(scores) - 1e30)
        if self.sinks is None:
            p = m.exp(m.log_softmax(seen, -1))
            return self._where_seen(p, m.zeros(p)), slope, None
        column = m.zeros(m.sum(scores, (-1,), keepdims=True)) + self.sinks
        every = m.exp(m.log_softmax(m.concatenate((seen, column)), -1))
        p = every[..., :-1]
        return self._where_seen(p, m.zeros(p)), slope, every[..., -1:]

    def kept(self, p, seed, dropout):
        """By what dropout multiplies each probability; None without it."""
        if not dropout:
            return None
        m, (*heads, queries, keys) = self.m, p.shape
        numbers = _numbers(m, seed, prod(heads), queries, (keys + 7) // 8)
        each = m.concatenate([number[..., None] for number in numbers])  # of adjacent keys
        each = m.reshape(m.reshape(each, (*each.shape[:-2], each.shape[-2] * 8))[..., :keys], p.shape)
        zeros = m.zeros(p)
        return m.where(each >= int(dropout * 2**16), zeros + 1 / (1 - dropout), zeros)

    def _where_seen(self, x, other):
        m, lengths = self.m, self.lengths
        *lead, queries, keys = x.shape
        if self.key_offsets is None and (self.left >= 0 or self.right >= 0):
            ones = (1,) * len(lead)
            row = m.reshape(m.arange(queries, x), (*ones, queries, 1)) + (keys - queries)
            x = self._within(x, other, m.reshape(m.arange(keys, x), (*ones, 1, keys)) - row)
        if lengths is not None:
            within = m.arange(keys, lengths) < lengths[..., None]
            ones = (1,) * (len(lead) - 2 - len(lengths.shape))
            x = m.where(m.reshape(within, (*ones, *lengths.shape, 1, 1, 1, keys)), x, other)
        if self.mask is not None:
            x = m.where(self.mask, x, other)
        if self.bias is not None:
            x = m.where(m.wide(self.bias) > -_INFINITY, x, other)
        return x if self.offsets is None else self._of_sequence(x, other)

    def _within(self, x, other, distance):
        """x where a key is so far behind the place that a query stands beside, in keys, as the window lets it be."""
        m = self.m
        if self.left >= 0:
            x = m.where(distance >= -self.left, x, other)
        return m.where(distance <= self.right, x, other) if self.right >= 0 else x

    def _of_sequence(self, x, other):
        """x where query and key are in one sequence."""
        m, (queries, keys), ones = self.m, x.shape[-2:], (1,) * (x.ndim - 2)
        number = self._numbers(self.offsets, queries)
        row, column = (m.reshape(number, (*ones, queries, 1)), m.reshape(number, (*ones, 1, queries)))
        if self.key_offsets is not None:
            column = m.reshape(m.like(self._numbers(self.key_offsets, keys), number), (*ones, 1, keys))
            if self.left >= 0 or self.right >= 0:
                at = m.arange(queries, number) + self._shifts(number)
                x = self._within(x, other, m.arange(keys, number) - m.reshape(at, (*ones, queries, 1)))
        x = m.where(row == column, x, other)
        return m.where(column > 0, m.where(column < self.offsets.shape[0], x, other), other)

    def _numbers(self, offsets, tokens):
        """The number of each token's sequence, from 1."""
        m = self.m
        passed = m.reshape(m.arange(tokens, offsets), (1, tokens)) - m.reshape(offsets, (offsets.shape[0], 1))
        zero = m.zeros(passed)
        return m.sum(m.where(passed >= 0, zero + 1, zero), (0,))

    def _shifts(self, number):
        """The keys by which each query's sequence ends further than among the queries."""
        m, ends, tokens = self.m, self.offsets, number.shape[0]
        shifts = m.like(self.key_offsets, ends) - ends
        away = m.reshape(number, (tokens, 1)) - m.reshape(m.arange(ends.shape[0], ends), (1, ends.shape[0]))
        zero = m.zeros(away)
        return m.sum(m.where(away == 0, zero + m.reshape(shifts, (1, ends.shape[0])), zero), (1,))


# ------------------------------------------------------------------------------------------------------ random numbers
# A number of 32 bits is two halves, (upper, lower), so that no product and no sum of theirs has more.

_HALF = 1 << 16


def _numbers(m, seed, heads, queries, eights):
    """The numbers of adjacent keys that cuda_src/operators/attention_dropout.h states: eight arrays, each
    (heads, queries, eights)."""
    seed = m.unsigned(seed)
    keys = [_halves(m.reshape(seed[..., i : i + 1], (1, 1, 1))) for i in range(2)]
    axes = (eights, (1, 1, eights)), (queries, (1, queries, 1)), (heads, (heads, 1, 1))
    a, b, c = (_halves(m.reshape(m.arange(n, seed), shape)) for n, shape in axes)
    d = tuple(m.zeros(x) for x in keys[0])
    for i in range(10):
        low, high = (_sum(key, i * step % 2**32) for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True))
        (left, of_a), (right, of_c) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = _xor(m, right, b, low), of_c, _xor(m, left, d, high), of_a
    whole = m.zeros(a[0] + b[0] + c[0] + d[0])
    return [whole + half for upper, lower in (a, b, c, d) for half in (lower, upper)]


def _halves(x):
    return x // _HALF, x % _HALF


def _sum(x, number):
    """Modulo 2**32."""
    lower = x[1] + number % _HALF
    return (x[0] + number // _HALF + lower // _HALF) % _HALF, lower % _HALF


def _product(x, number):
    """The upper and the lower 32 bits."""
    (upper, lower), more, less = x, number // _HALF, number % _HALF
    last = lower * less
    middle = upper * less + last // _HALF
    other = lower * more + middle % _HALF
    whole = upper * more + middle // _HALF + other // _HALF
    return _halves(whole), (other % _HALF, last % _HALF)


def _xor(m, *numbers):
    return tuple(m.xor(m.xor(x, y), z) for x, y, z in zip(*numbers, strict=True))


# ---------------------------------------------------------------------------------------------------------- definition


@operator(
    inputs=("q", "k", "v", "lengths", "mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed"),
    outputs=("y",),
    residuals=("lse",),
    optional=("lengths", "mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed"),
    attrs={
        **{"causal": "bool", "scale": "float?", "window": "int[]", "softcap": "float", "layout": "str"},
        "dropout": "float",
    },
    shapes={"y": lambda call: (*call.q[:-1], call.v[-1]), "lse": _lse_shape},
    dims=_dims,
    formula=_formula,
    product=Product(factors=(("q", "k"), "v"), flops=_flops, bilinear=False),
    vmappable=("q", "k", "v", "y", "lse"),
    seeds=("seed",),
    min_rank=3,
    always_save_residuals=True,
    autocast=Autocast.LOWER,
    backward={
        "inputs": (
            *("dy", "q", "k", "v", "lengths", "mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed"),
            *("y", "lse"),
        ),
        "outputs": ("dq", "dk", "dv", "dbias", "dsinks"),
        "workspace": ("workspace",),
        "optional": (
            *("lengths", "mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed", "lse"),
            *("dq", "dk", "dv", "dbias", "dsinks"),
        ),
        "same_spec_as": {"dq": "q", "dk": "k", "dv": "v"},
        "shapes": {"dbias": _added_shape("bias"), "dsinks": _added_shape("sinks")},
        "dims": _backward_dims,
        "formula": _backward_formula,
        "vmappable": ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv"),
        "seeds": ("seed",),
        "min_rank": 2,
    },
)
def attention(
    q,
    k,
    v,
    lengths=None,
    mask=None,
    bias=None,
    sinks=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    causal=False,
    scale=None,
    window=None,
    softcap=0.0,
    layout="BSHD",
    seed=None,
    dropout=0.0,
):
    """Scaled dot-product attention: ``softmax(scale * q @ k.T + bias) @ v`` of each head, over the keys that a query
    sees. The matrix of scores is never stored: memory is linear in the lengths.

    A query sees the keys that every one of ``lengths``, ``mask``, ``cu_seqlens``, ``causal`` and ``window`` lets it
    see. The last query stands beside the last key: query i beside key ``i + keys - queries``. One that sees none has a
    result of 0, and no part in the gradients but for that of its sink.

    Args:
        q: (..., queries, heads, head_dim); float16, bfloat16, float32 or float64.
        k: (..., keys, kv_heads, head_dim), of q's dtype and leading axes. Each of its heads is shared by heads /
            kv_heads adjacent ones of q, without a copy.
        v: (..., keys, kv_heads, any head_dim), likewise.
        lengths: the number of keys, from the first on, that there are; int32 or int64, of the shape of the leading axes
            of q, or of the last of them. Those after them are not read. They do not move what causal and window count
            from.
        mask: bool, of a shape that broadcasts to (..., heads, queries, keys) in either layout: whether a query sees a
            key. What it hides is multiplied by 0, and so is to be finite.
        bias: added to the scores, after the softcap; of q's dtype, or float32 where that has 16 bits. It broadcasts as
            mask does, and its gradient is summed as it is broadcast. A key whose bias is -inf is not seen.
        sinks: (heads,), of the dtypes that bias may have: a logit of each head that has a share in its softmax, and no
            value. (Source: Xiao et al., arXiv:2309.17453; learned, as in gpt-oss.)
        cu_seqlens: (sequences + 1,), int32 or int64, ascending from 0 up to queries: where each of the sequences that
            are packed along the axis begins, and where the last one ends. A query sees keys of its own sequence; one
            after the last end sees none. It is for each of the leading axes. Without cu_seqlens_k there are as many
            queries as keys.
        cu_seqlens_k: likewise of keys, of cu_seqlens' dtype and shape, ascending from 0 up to keys: sequence i of the
            queries sees keys of sequence i of these. Then causal and window count from the ends of the two, and not
            from those of the axes.
        causal: a query sees no key after the one that it stands beside. (torch's ``is_causal`` places the first query
            beside the first key; the two agree where there are as many.)
        scale: None for ``head_dim ** -0.5``.
        window: (left, right): a query sees so many keys before and after the one that it stands beside; -1 for all.
        softcap: if not 0, scores are ``softcap * tanh(scores / softcap)``.
        layout: of q, k, v and the result: "BSHD", as above, or "BHSD" for (..., heads, queries, head_dim).
        seed: (2,), int32 or int64: two random numbers, of which the lower 32 bits count, which the caller draws for
            each call. With the place of a probability in (..., heads, queries, keys) they say whether dropout keeps it,
            on every device and in the backward.
        dropout: the part of the probabilities that are replaced by 0, after the softmax; the others are divided by
            ``1 - dropout``. In steps of 2**-16. Where it is not 0, there is to be a seed.

    Returns:
        (..., queries, heads, head_dim of v), of q's dtype. Sums are taken in float32 (float64 for float64). In 16 bits
        the probabilities are rounded before they are multiplied, as torch's are.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; lengths, cu_seqlens, cu_seqlens_k or a seed that are not
            int32 or int64; a mask that is not bool.
        ValueError: shapes that do not fit; a scale or softcap that is not finite, a softcap below 0, another layout or
            window; a dropout that is not from 0 on and below 1, or without a seed; cu_seqlens_k without cu_seqlens;
            tensors on different devices; on the CPU, a length that is not from
            0 to keys, and offsets of sequences that do not ascend as said. On a GPU the results of such an example, or
            call, are NaN.
        NotImplementedError: a mask or bias that is broadcast along more than two leading axes of q with others between
            them.

    Source: Dao, arXiv:2307.08691.
    """
    inputs = (q, k, v, lengths, mask, bias, sinks, cu_seqlens, cu_seqlens_k, seed)
    return inputs, (causal, scale, (-1, -1) if window is None else window, softcap, layout, dropout)
