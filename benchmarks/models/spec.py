"""The subject of a row: a model of a size, an implementation in a framework, and a precision. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

IGNORED = -100
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.1
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's defaults of AdamW
TRAINED = 50  # steps before the loss that is reported


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int  # or classes of images
    batch: int
    tokens: int
    image: int = 0  # height and width of images
    patch: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.tokens


SIZES: dict[str, tuple[Size, Size]] = {
    "gpt2": (Size(12, 768, 12, 3072, 50304, 16, 1024), Size(2, 32, 2, 128, 211, 2, 16)),
    "gpt2_head": (Size(12, 768, 12, 3072, 50304, 16, 1024), Size(2, 32, 2, 128, 211, 2, 16)),
    "llama": (Size(8, 2048, 16, 5632, 32000, 4, 2048), Size(2, 32, 2, 96, 224, 2, 16)),
    "llama_head": (Size(8, 2048, 16, 5632, 32000, 4, 2048), Size(2, 32, 2, 96, 224, 2, 16)),
    "llama_packed": (Size(8, 2048, 16, 5632, 32000, 4, 2048), Size(2, 32, 2, 96, 224, 2, 16)),
    "bert": (Size(12, 768, 12, 3072, 30522, 32, 512), Size(2, 32, 2, 128, 218, 2, 16)),
    "vit": (Size(12, 1024, 16, 4096, 1000, 64, 197, 224, 16), Size(2, 32, 2, 128, 10, 2, 5, 8, 4)),
    "resnet": (Size(50, 64, 0, 0, 1000, 128, 1, 224), Size(50, 8, 0, 0, 10, 2, 1, 64)),
}
"""The size of a model and its tiny size, for tests. GPT-2's 50257 tokens are padded to a multiple of 128, as is usual
in training. A vision transformer's tokens are its patches and one more; an image of ResNet counts as one."""

OPERATORS: dict[str, tuple[str, ...]] = {
    "gpt2": ("linear", "qkv_attention", "attention", "layer_norm", "add_layer_norm", "cross_entropy"),
    "gpt2_head": ("linear", "qkv_attention", "attention", "layer_norm", "add_layer_norm", "linear_cross_entropy"),
    "llama": ("linear", "qkv_rope", "attention", "rms_norm", "add_rms_norm", "swiglu", "cross_entropy"),
    "llama_head": ("linear", "qkv_rope", "attention", "rms_norm", "add_rms_norm", "swiglu", "linear_cross_entropy"),
    "llama_packed": ("linear", "qkv_rope", "attention", "rms_norm", "add_rms_norm", "swiglu", "cross_entropy"),
    "bert": ("linear", "qkv_attention", "attention", "layer_norm", "add_layer_norm", "cross_entropy"),
    "vit": ("conv2d", "linear", "qkv_attention", "attention", "layer_norm", "add_layer_norm", "cross_entropy"),
    "resnet": ("conv2d", "batch_norm", "batch_norm_relu", "linear", "cross_entropy"),
}
"""The operators whose kernels a model's time depends on."""
_ATTENTION = ("qkv_attention", "qkv_rope", "attention")
"""Operators that an implementation with the framework's attention does not have."""

MODELS: dict[str, tuple[str, ...]] = {"torch": tuple(SIZES), "jax": ("gpt2",), "mindspore": ("gpt2",)}
IMPLS: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "aotops", "torch.compile", "aotops.compile", "aotops.sdpa", "aotops.sdpa.compile"),
    "jax": ("jax", "aotops", "aotops.attention"),
    "mindspore": ("mindspore", "aotops"),
}
PRECISIONS: dict[str, tuple[str, ...]] = {
    "torch": ("bfloat16", "autocast", "float32"),
    "jax": ("bfloat16", "float32"),
    "mindspore": ("float32",),
}
"""By framework, the first implementation being the framework's own operators."""

ASKED_FOR = ("aotops.sdpa", "aotops.sdpa.compile")
"""Implementations that are measured where they are named: aotops' with torch's attention."""


@dataclass(frozen=True)
class Spec:
    model: str
    impl: str
    precision: str  # bfloat16: of the parameters; autocast: parameters in float32; float32
    timed: int = 20
    tiny: bool = False
    deterministic: bool = False
    profile: bool = False
    compile_only: bool = False
    framework: str = "torch"
    turns: str = ""
    """The file whose lock the timed steps hold (aotops.bench.turns); of torch."""

    @property
    def flavour(self) -> str:
        return self.impl.removesuffix(".compile")

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles it, whose code is cached from process to process."""
        return self.impl.endswith("compile")

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of the library whose kernels its time depends on."""
        if not self.impl.startswith("aotops"):
            return ()
        if self.flavour == "aotops" and self.framework == "torch":
            return (*OPERATORS[self.model], "adamw")
        others = tuple(op for op in OPERATORS[self.model] if op not in _ATTENTION)
        if self.framework == "torch":
            return (*others, "adamw")
        return others + ("attention",) * self.flavour.endswith(".attention")

    @property
    def trained(self) -> int:
        """Steps: the first one, the warm-up and the timed ones."""
        return self.timed + 2 if self.tiny else max(TRAINED, self.timed + 10)

    @property
    def size(self) -> Size:
        return SIZES[self.model][self.tiny]
