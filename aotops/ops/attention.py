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
    return stated | {f"d{slot}": stated[slot] for slot in ("q", "k", "v", "y")}


def _stated(call, of_lse=""):
    """Leading axes are independent; heads where each of k has one of q; queries where all see the same keys; and the
    head_dim of v, along which the gradient of a score is a sum. ``of_lse``: what follows its axes."""
    heads, _ = _axes(call)
    q_heads, kv_heads = ("h", "h") if call.q[heads] == call.k[heads] else ("H", "K")
    s = "S" if call.causal or max(call.window) >= 0 else "s"
    lines = () if call.lengths is None else call.lengths
    leading = call.q[:-3]
    own = lines == leading[len(leading) - len(lines) :]
    lead = " ".join(["...", *(f"b{i}" for i in range(len(lines)) if own)])

    def rows(h, s, d):
        return f"{lead} {h} {s} {d}" if call.layout == "BHSD" else f"{lead} {s} {h} {d}"

    query, key, value = rows(q_heads, s, "D"), rows(kv_heads, "T", "D"), rows(kv_heads, "T", "e")
    return {
        **{"q": query, "k": key, "v": value, "y": rows(q_heads, s, "e"), "lse": f"{lead} {q_heads} {s}{of_lse}"},
        "lengths": " ".join(f"{'b' if own else 'B'}{i}" for i in range(len(lines))),
    }


# ------------------------------------------------------------------------------------------------------------ formulas


def _formula(m, q, k, v, lengths, causal, scale, window, softcap, layout):
    call = _Call(m, q, k, v, lengths, causal, scale, window, softcap, layout)
    p, _ = call.probabilities()
    return call.joined(call.matmul(p, call.v))


def _backward_formula(m, dy, q, k, v, lengths, causal, scale, window, softcap, layout):
    """y and lse are functions of q, k and v, and not read: the derivatives of these are whole without them."""
    call = _Call(m, q, k, v, lengths, causal, scale, window, softcap, layout)
    p, slope = call.probabilities()
    dy = call.groups(dy)
    dp = call.matmul(dy, call.v, transpose_b=True)
    ds = p * (dp - m.sum(p * dp, (-1,), keepdims=True)) * slope
    dq = call.joined(call.matmul(ds, call.k))
    dk, dv = (call.of_keys(call.matmul(a, b, transpose_a=True)) for a, b in ((ds, call.q), (p, dy)))
    return dq, dk, dv


class _Call:
    """q as (..., kv_heads, heads / kv_heads, queries, head_dim), wide; k and v as (..., kv_heads, 1, keys, dim)."""

    def __init__(self, m, q, k, v, lengths, causal, scale, window, softcap, layout):
        self.m, self.layout, self.softcap, self.lengths = m, layout, softcap, lengths
        self.kv_heads = k.shape[-3 if layout == "BHSD" else -2]
        self.q, self.k, self.v = self.groups(q), self.shared(k), self.shared(v)
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
        """The probability of each key for each query, 0 where it is not seen; and the slope of the exponent."""
        m = self.m
        scores, slope = self.matmul(self.q, self.k, transpose_b=True) * self.scale, self.scale
        if self.softcap:
            t = m.tanh(scores / self.softcap)
            scores, slope = t * self.softcap, (1 - t * t) * self.scale
        if not scores.shape[-1]:
            return scores, slope
        unseen = m.zeros(scores) - 1e30
        p = m.exp(m.log_softmax(self._where_seen(scores, unseen), -1))
        return self._where_seen(p, m.zeros(p)), slope

    def _where_seen(self, x, other):
        m, lengths = self.m, self.lengths
        *lead, queries, keys = x.shape
        if self.left >= 0 or self.right >= 0:
            ones = (1,) * len(lead)
            row = m.reshape(m.arange(queries, x), (*ones, queries, 1)) + (keys - queries)
            distance = m.reshape(m.arange(keys, x), (*ones, 1, keys)) - row
            if self.left >= 0:
                x = m.where(distance >= -self.left, x, other)
            if self.right >= 0:
                x = m.where(distance <= self.right, x, other)
        if lengths is not None:
            within = m.arange(keys, lengths) < lengths[..., None]
            ones = (1,) * (len(lead) - 2 - len(lengths.shape))
            x = m.where(m.reshape(within, (*ones, *lengths.shape, 1, 1, 1, keys)), x, other)
        return x


# ---------------------------------------------------------------------------------------------------------- definition


@operator(
    inputs=("q", "k", "v", "lengths"),
    outputs=("y",),
    residuals=("lse",),
    optional=("lengths",),
    attrs={"causal": "bool", "scale": "float?", "window": "int[]", "softcap": "float", "layout": "str"},
    shapes={"y": lambda call: (*call.q[:-1], call.v[-1]), "lse": _lse_shape},
    dims=_dims,
    formula=_formula,
    product=Product(factors=(("q", "k"), "v"), flops=_flops, bilinear=False),
    vmappable=("q", "k", "v", "y", "lse"),
    min_rank=3,
    always_save_residuals=True,
    autocast=Autocast.LOWER,
    backward={
        "inputs": ("dy", "q", "k", "v", "lengths", "y", "lse"),
        "outputs": ("dq", "dk", "dv"),
        "workspace": ("workspace",),
        "optional": ("lengths", "lse", "dq", "dk", "dv"),
        "same_spec_as": {"dq": "q", "dk": "k", "dv": "v"},
        "dims": _backward_dims,
        "formula": _backward_formula,
        "vmappable": ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv"),
        "min_rank": 2,
    },
)
def attention(q, k, v, lengths=None, causal=False, scale=None, window=None, softcap=0.0, layout="BSHD"):
    """Scaled dot-product attention: ``softmax(scale * q @ k.T) @ v`` of each head, over the keys that a query sees. The
    matrix of scores is never stored: memory is linear in the lengths.

    A query sees the keys that every one of ``lengths``, ``causal`` and ``window`` lets it see. The last query stands
    beside the last key: query i beside key ``i + keys - queries``. One that sees none has a result of 0, and no part in
    the gradients.

    Args:
        q: (..., queries, heads, head_dim); float16, bfloat16, float32 or float64.
        k: (..., keys, kv_heads, head_dim), of q's dtype and leading axes. Each of its heads is shared by heads /
            kv_heads adjacent ones of q, without a copy.
        v: (..., keys, kv_heads, any head_dim), likewise.
        lengths: the number of keys, from the first on, that there are; int32 or int64, of the shape of the leading axes
            of q, or of the last of them. Those after them are not read. They do not move what causal and window count
            from.
        causal: a query sees no key after the one that it stands beside. (torch's ``is_causal`` places the first query
            beside the first key; the two agree where there are as many.)
        scale: None for ``head_dim ** -0.5``.
        window: (left, right): a query sees so many keys before and after the one that it stands beside; -1 for all.
        softcap: if not 0, scores are ``softcap * tanh(scores / softcap)``.
        layout: of q, k, v and the result: "BSHD", as above, or "BHSD" for (..., heads, queries, head_dim).

    Returns:
        (..., queries, heads, head_dim of v), of q's dtype. Sums are taken in float32 (float64 for float64). In 16 bits
        the probabilities are rounded before they are multiplied, as torch's are.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; lengths that are not int32 or int64.
        ValueError: shapes that do not fit; a scale or softcap that is not finite, a softcap below 0, another layout or
            window; tensors on different devices; on the CPU, a length that is not from 0 to keys. On a GPU the results
            of such an example are NaN.

    Source: Dao, arXiv:2307.08691.
    """
    return (q, k, v, lengths), (causal, scale, (-1, -1) if window is None else window, softcap, layout)
