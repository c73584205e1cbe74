"""Model and training configuration: frozen dataclasses, derived sizes, validation.

Glossary. [1] is the Mamba paper (Gu and Dao 2023, arXiv:2312.00752), [2] the Mamba-2 paper (Dao
and Gu 2024, arXiv:2405.21060); official names are those of state-spaces/mamba, and of Hugging
Face's MambaConfig after the slash where they differ.

    batch, seqlen   sequences in a batch, tokens in a sequence     (`B`, `L` in [1] Algorithm 2)
    rows            batch * seqlen
    vocab_size      number of distinct tokens                       official: vocab_size
    d_model         width of the residual stream                    (`D` in [1] Algorithm 2)
                    official: d_model / hidden_size
    n_layer         number of layers                                official: n_layer / num_hidden_layers
    layers          the schedule: the type of each layer, in order
    expand          expansion factor                                (`E` in [1] Section 3.4)
    d_inner         expand * d_model: channels of conv and scan     official: d_inner / intermediate_size
    d_state         state size of each channel                      (`N` in [1] Algorithm 2)
                    official: d_state / state_size
    d_conv          taps of the causal depthwise convolution        ([1] Section 3.4, Figure 3)
                    official: d_conv / conv_kernel
    dt_rank         rank of the projection that makes delta         (`R` in [1] Section 3.6)
                    official: dt_rank / time_step_rank
    n_heads, head_dim  Mamba-2: d_inner is n_heads heads of head_dim channels, which share A, D and
                    delta                                           (`H`, `P` in [2] Section 7.2)
                    official: nheads, headdim / num_heads, head_dim
    n_groups        Mamba-2: groups of heads; those of one share B and C
                    official: ngroups / n_groups                    (`G` in [2] Section 7.2)
    A, A_log        state matrix, diagonal; A = -exp(A_log)         ([1] Section 3.6, S4D-Real)
    B, C            input and output matrices, selective            ([1] Section 3.2)
    D               skip from the scan's input to its output
    xz, x, z        in_proj's output; its two halves: into the convolution, and the gate
    u               the scan's input: silu(conv1d(x))
    x_dbl           x_proj's output: dt, B and C side by side
    dt, delta       the step size before and after softplus         (`Δ` in [1] Section 3.2)
    y               the scan's output                               ([1] Algorithm 2)
    q, k, v         queries, keys and values of attention           (Vaswani et al. 2017)
    d_ff            width of a gated MLP                            official: d_intermediate
    discretization  how A and B become discrete:                    ([1] Section 2, equation 4)
                    euler is delta * B, as the official kernels compute it;
                    zoh, zero-order hold, is (exp(delta * A) - 1) / A * B
    m, v            first and second moments of AdamW               (Loshchilov and Hutter 2019)
    nats            unit of the loss: natural logarithms of probabilities
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import json
import math
import numbers
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from .errors import ConfigError

WRITE_THROUGH = {"train": ("*.x_proj.*",), "max_delta": 0.05}
LORA_TARGETS = ("in_proj", "x_proj", "dt_proj", "out_proj", "fc1", "fc2")
Precision = Literal["f32", "f16"]
LoraBase = Literal["f32", "f16", "int8"]
NO_DECAY = ("*A_log", "*.D", "*norm*.weight", "*bias")
VARIANT = "wgsl_train_mamba"  # model_type of the models that transformers cannot express
HYBRID = "wgsl_train_hybrid"  # and of those whose layers are not all plain Mamba

# The table of layer types. Each is the module of its name in models/; listed are the fields of
# MambaConfig that it has, and that an entry of a schedule may set for its layer alone.
LAYER_TYPES: dict[str, tuple[str, ...]] = {
    "mamba": (
        "d_state",
        "d_conv",
        "expand",
        "dt_rank",
        "discretization",
        "use_conv_bias",
        "use_bias",
        "x_proj_bias",
    ),
    "mamba2": (
        "d_state",
        "d_conv",
        "expand",
        "head_dim",
        "n_groups",
        "norm_per_group",
        "use_conv_bias",
        "use_bias",
    ),
    "attention": (
        "attn_heads",
        "attn_kv_heads",
        "attn_head_dim",
        "attn_rotary_dim",
        "attn_rope_theta",
        "attn_bias",
    ),
}
# Fields that all layers of a type have from the model alone
_OF_ALL = {"a_log_clamp": "mamba", "time_step_limit": "mamba2"}
# What may follow a mixer, and the fields that it has
MLP_TYPES: dict[str, tuple[str, ...]] = {"none": (), "swiglu": ("d_ff",)}
_ANY_LAYER = ("mlp", "share")

# Sets of MambaConfig's fields, to start from
PRESETS: dict[str, dict[str, Any]] = {
    "memory_engine": {
        "discretization": "zoh",
        "use_bias": True,
        "x_proj_bias": True,
        "lm_head_bias": True,
        "norm_eps": 1e-6,
        "a_log_clamp": (-10.0, 5.0),
        "init": "memory_engine",
    },
    # Lieber et al. 2024, arXiv:2403.19887: one layer in 8 attends; a MLP follows each
    "jamba": {"layers": ("mamba*4", "attention", "mamba*3"), "mlp": "swiglu"},
    # Glorioso et al. 2024, arXiv:2405.16712: one block of attention and MLP, after every 6 layers
    "zamba": {"layers": ("mamba*6", "attention:mlp=swiglu:share=block") * 2},
}


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a preset. Raises ConfigError at an unknown one."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


def expand_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model, among which "preset" stands for those that are not given themselves."""
    own = {name: value for name, value in values.items() if name != "preset"}
    return {**preset_fields(values["preset"]), **own} if "preset" in values else own


def _rule(
    default: Any, low: float | None = None, high: float | None = None, *, among: Iterable[Any] = ()
) -> Any:
    """A dataclass field with its allowed range: low <= value <= high, or one of `among`."""
    return field(default=default, metadata={"low": low, "high": high, "among": tuple(among)})


class _Checked:
    """What both configurations share: every field is checked against its annotation and range."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if (value is None or value == "auto") and f.default == value:
                continue
            rule = {**f.metadata, "auto": f.default == "auto"}
            value = self._typed(f.name, value, str(f.type).removesuffix(" | None"), rule)
            object.__setattr__(self, f.name, value)

    def _typed(self, name: str, value: Any, kind: str, rule: Mapping[str, Any]) -> Any:
        """The value, as the field's own type. Raises ConfigError."""
        span = _span(rule.get("low"), rule.get("high"))
        is_bool = isinstance(value, bool)
        if kind == "bool":
            right, allowed = is_bool, "true or false"
        elif kind == "int":
            right = isinstance(value, numbers.Integral) and not is_bool and _within(value, rule)
            allowed = f"an integer{span}" + ' or "auto"' * rule["auto"]
        elif kind == "float":
            right = isinstance(value, numbers.Real) and not is_bool and _within(value, rule)
            allowed = f"a number{span}"
        elif kind == "tuple[str, ...]":
            right = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
            allowed = "a list of name patterns"
        elif kind == "tuple[int, int]":
            right = (
                isinstance(value, (list, tuple))
                and len(value) == 2
                and all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in value)
                and 0 <= value[0] < value[1]
            )
            allowed = "(index, count), two integers, 0 <= index < count"
        elif kind == "tuple[float, float]":
            right = (
                isinstance(value, (list, tuple))
                and len(value) == 2
                and all(isinstance(v, numbers.Real) and not isinstance(v, bool) for v in value)
                and all(_within(v, rule) for v in value)
                and value[0] < value[1]
            )
            allowed = f"(low, high), low < high, each a number{span}"
        else:
            right = isinstance(value, str) and value in rule["among"]
            allowed = " or ".join(map(repr, rule["among"]))
        if not right:
            self._refuse(name, value, allowed)
        return _CAST.get(kind, lambda v: v)(value)

    def _refuse(self, name: str, value: Any, allowed: str) -> None:
        raise ConfigError(f"{type(self).__name__}.{name} is {value!r}; allowed: {allowed}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from a mapping of field names. Raises ConfigError at an unknown one."""
        check_keys(values, [f.name for f in fields(cls)], cls.__name__)  # type: ignore[arg-type]
        for f in fields(cls):  # type: ignore[arg-type]
            if f.default is MISSING and f.name not in values:
                raise ConfigError(f"{cls.__name__} needs {f.name}")
        return cls(**_from_json(dict(values)))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON knows them."""
        return _to_json(asdict(self))  # type: ignore[call-overload, no-any-return]


_INFINITY = {"__float__": "Infinity"}  # as transformers writes what JSON has no number for


def _to_json(value: Any) -> Any:
    """A value in JSON's types."""
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return _INFINITY if value == math.inf else value


def _from_json(value: Any) -> Any:
    """The inverse of `_to_json`, up to lists for tuples."""
    if value == _INFINITY:
        return math.inf
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value


_CAST: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "tuple[str, ...]": tuple,
    "tuple[int, int]": lambda pair: tuple(map(int, pair)),
    "tuple[float, float]": lambda pair: tuple(map(float, pair)),
}


def _within(value: Any, rule: Mapping[str, Any]) -> bool:
    """Whether a number is in its field's range; infinite only where that goes so far."""
    low, high = rule.get("low"), rule.get("high")
    return bool(
        (-math.inf < value < math.inf or value in (low, high))
        and (low is None or low <= value)
        and (high is None or value <= high)
    )


def _span(low: float | None, high: float | None) -> str:
    """A range in words, to follow a noun."""
    if low is None:
        return ""
    return f" from {low} to {high}" if high is not None else f", {low} or more"


def check_keys(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises ConfigError naming the first unknown key and the nearest valid one."""
    valid = list(valid)
    for key in given:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(valid)
            raise ConfigError(f"{where} has no {key!r}; {hint}")


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    type     what it is: a key of LAYER_TYPES
    config   the model's, with this layer's own options
    owner    number of the layer whose parameters it uses: its own, unless they are shared
    follows  the fields of its type and its MLP that it takes from the model
    """

    type: str
    config: MambaConfig
    owner: int
    follows: frozenset[str]


def _entries(layers: Iterable[str]) -> Iterator[str]:
    """The entries of a schedule, one a layer: of "mamba*2,attention" mamba, mamba, attention."""
    for text in ",".join(layers).split(","):
        entry, star, count = (part.strip() for part in text.partition("*"))
        if star and not re.fullmatch("[1-9][0-9]{0,3}", count):
            raise ConfigError(
                f"MambaConfig.layers: {text!r}: a number from 1 to 9999 must follow *"
            )
        yield from [entry] * int(count or 1)


def _value(text: str) -> Any:
    """An option's value in an entry: a number or a truth value as JSON has them, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class MambaConfig(_Checked):
    """A Mamba language model: its sizes, its variant, and how it is initialised.

    The defaults describe the official model, as Hugging Face's MambaForCausalLM computes it; the
    module's glossary has the names. Raises ConfigError naming field, value and allowed range.

    vocab_size               number of distinct tokens
    d_model                  width of the residual stream
    n_layer                  number of layers; by default as many as layers has
    layers                   types of the layers, in order; they repeat where n_layer is larger;
                             by default all are "mamba"
    d_state                  state size of each channel
    d_conv                   taps of the causal convolution
    expand                   channels of convolution and scan, in units of d_model
    dt_rank                  rank of the projection that makes delta; "auto" is ceil(d_model / 16)
    discretization           "euler", as the official kernels, or "zoh", zero-order hold
    head_dim                 Mamba-2: channels of a head
    n_groups                 Mamba-2: groups of heads, each with a B and a C of its own
    norm_per_group           Mamba-2: whether the gated norm is over each group's channels, as in
                             mamba_ssm's Mamba2 and transformers 5, or over all of them
    time_step_limit          Mamba-2: (low, high) that delta is clamped to; high may be infinite
    attn_heads               attention: heads of queries; "auto" is ceil(d_model / attn_head_dim)
    attn_kv_heads            attention: heads of keys and values, a divisor of attn_heads; 0: as many
    attn_head_dim            attention: columns of a head; "auto" is d_model, at most 64
    attn_rotary_dim          attention: leading columns of a head that turn with the position; 0: none
    attn_rope_theta          attention: base of the frequencies with which columns turn
    attn_bias                attention: whether in_proj and out_proj have a bias
    mlp                      what follows each mixer: "none", or "swiglu", a gated MLP
    d_ff                     width of the MLP; "auto" is 8/3 d_model, rounded up to a multiple of 64
    use_conv_bias            whether conv1d has a bias
    use_bias                 whether in_proj and out_proj have one
    x_proj_bias              whether x_proj has one
    lm_head_bias             whether the head has one
    tie_embeddings           whether the head's weight is the embedding table
    norm_eps                 added to the mean square in every RMSNorm
    a_log_clamp              (low, high): A = -exp(clamp(A_log)), with no gradient outside
    pad_vocab_size_multiple  the table has vocab_size rounded up to a multiple of this
    init                     "official" or "memory_engine": distributions of the first weights
    initializer_range        official init: standard deviation of the embeddings
    rescale_prenorm_residual official init: whether out_proj and fc2 are divided by the square root
                             of their number, which without MLPs is n_layer
    time_step_min            official init: delta starts log-uniform, from this on
    time_step_max            official init: up to this
    time_step_floor          official init: and no smaller than this
    time_step_scale          official init: factor of the range of dt_proj's weight
    residual_in_fp32         kept for other programs; residuals are in float32 here always
    bos_token_id             kept for tokenizers
    eos_token_id             ends generation
    pad_token_id             kept for tokenizers
    """

    vocab_size: int = _rule(MISSING, 1, 1 << 20)
    d_model: int = _rule(MISSING, 1, 1 << 16)
    n_layer: int = _rule("auto", 1, 4096)
    layers: tuple[str, ...] = ()
    d_state: int = _rule(16, 1, 1024)
    d_conv: int = _rule(4, 1, 32)  # kernels unroll over the taps
    expand: int = _rule(2, 1, 64)
    dt_rank: int = _rule("auto", 1, 1 << 16)
    discretization: Literal["euler", "zoh"] = _rule("euler", among=("euler", "zoh"))
    head_dim: int = _rule(64, 1, 1 << 16)
    n_groups: int = _rule(1, 1, 1 << 16)
    norm_per_group: bool = True
    time_step_limit: tuple[float, float] = _rule((0.0, math.inf), 0.0, math.inf)
    attn_heads: int = _rule("auto", 1, 1 << 16)
    attn_kv_heads: int = _rule(0, 0, 1 << 16)
    attn_head_dim: int = _rule("auto", 1, 1 << 16)
    attn_rotary_dim: int = _rule(0, 0, 1 << 16)
    attn_rope_theta: float = _rule(10000.0, 1.0, 1e12)
    attn_bias: bool = False
    mlp: Literal["none", "swiglu"] = _rule("none", among=MLP_TYPES)
    d_ff: int = _rule("auto", 1, 1 << 20)
    use_conv_bias: bool = True
    use_bias: bool = False
    x_proj_bias: bool = False
    lm_head_bias: bool = False
    tie_embeddings: bool = True
    norm_eps: float = _rule(1e-5, 1e-12, 1.0)
    a_log_clamp: tuple[float, float] | None = _rule(None, -80.0, 80.0)
    pad_vocab_size_multiple: int = _rule(1, 1, 1 << 16)
    init: Literal["official", "memory_engine"] = _rule(
        "official", among=("official", "memory_engine")
    )
    initializer_range: float = _rule(0.02, 0.0, 10.0)
    rescale_prenorm_residual: bool = True
    time_step_min: float = _rule(1e-3, 1e-12, 1e3)
    time_step_max: float = _rule(0.1, 1e-12, 1e3)
    time_step_floor: float = _rule(1e-4, 1e-12, 1e3)
    time_step_scale: float = _rule(1.0, 1e-12, 1e3)
    residual_in_fp32: bool = True
    bos_token_id: int | None = _rule(None, 0, (1 << 31) - 1)
    eos_token_id: int | None = _rule(None, 0, (1 << 31) - 1)
    pad_token_id: int | None = _rule(None, 0, (1 << 31) - 1)

    def __post_init__(self) -> None:
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", (self.layers,))
        super().__post_init__()
        auto = frozenset(f.name for f in fields(self) if getattr(self, f.name) == "auto")
        pattern = tuple(_entries(self.layers)) if self.layers else ("mamba",)
        if self.n_layer == "auto":  # type: ignore[comparison-overlap]
            if not self.layers:
                raise ConfigError("MambaConfig needs n_layer, or layers")
            object.__setattr__(self, "n_layer", len(pattern))
        if self.n_layer % len(pattern):
            allowed = f"multiples of {len(pattern)}, the number of layers that layers has"
            self._refuse("n_layer", self.n_layer, allowed)
        object.__setattr__(self, "layers", pattern * (self.n_layer // len(pattern)))
        if self.dt_rank == "auto":  # type: ignore[comparison-overlap]
            object.__setattr__(self, "dt_rank", -(-self.d_model // 16))
        if self.attn_head_dim == "auto":  # type: ignore[comparison-overlap]
            object.__setattr__(self, "attn_head_dim", min(64, self.d_model))
        if self.attn_heads == "auto":  # type: ignore[comparison-overlap]
            object.__setattr__(self, "attn_heads", self.auto_heads)
        if self.d_ff == "auto":  # type: ignore[comparison-overlap]
            object.__setattr__(self, "d_ff", -(-8 * self.d_model // (3 * 64)) * 64)
        if self.time_step_min > self.time_step_max:
            self._refuse(
                "time_step_min", self.time_step_min, f"at most time_step_max, {self.time_step_max}"
            )
        if self.padded_vocab_size > 1 << 20:
            self._refuse(
                "pad_vocab_size_multiple",
                self.pad_vocab_size_multiple,
                f"one that leaves the padded vocabulary at {1 << 20} or less",
            )
        if set(self.layers) != {"mamba"}:
            resolved = {entry: self._resolved(entry, auto) for entry in dict.fromkeys(pattern)}
            object.__setattr__(self, "layers", tuple(resolved[entry] for entry in self.layers))
            _ = self.schedule  # which checks the entries

    @functools.cached_property
    def schedule(self) -> tuple[Layer, ...]:
        """Every layer, in order. Raises ConfigError at an entry that is none."""
        read = {entry: self._read_entry(entry) for entry in dict.fromkeys(self.layers)}
        owners: dict[str, int] = {}
        made = []
        for i, entry in enumerate(self.layers):
            kind, config, tag, follows = read[entry]
            owner = owners.setdefault(tag, i) if tag else i
            if self.layers[owner] != entry:
                raise ConfigError(
                    f"MambaConfig.layers: {self.layers[owner]!r} and {entry!r} cannot share "
                    "parameters: they differ"
                )
            made.append(Layer(kind, config, owner, follows))
        return tuple(made)

    def check_effect(self, names: Iterable[str]) -> None:
        """Raises ConfigError at the first of these fields that no layer of the model takes from it."""
        types = {layer.type for layer in self.schedule}
        followed = {name for name, kind in _OF_ALL.items() if kind in types}
        followed.update(*(layer.follows for layer in self.schedule))
        for name in names:
            have = [repr(kind) for kind, its in LAYER_TYPES.items() if name in its]
            have += [repr(_OF_ALL[name])] if name in _OF_ALL else []
            mlps = [repr(kind) for kind, its in MLP_TYPES.items() if name in its]
            if (have or mlps) and name not in followed:
                whose = (
                    f"mlp {' or '.join(mlps)}" if mlps else f"layers of type {' or '.join(have)}"
                )
                raise ConfigError(
                    f"{name} has no effect: it is an option of {whose}, and no such layer of this "
                    "model takes it from there; leave it out, or choose other layers (layers, mlp)"
                )

    def _check_heads(self) -> None:
        """Raises ConfigError where the heads of a Mamba-2 layer do not come out even."""
        if self.d_inner % self.head_dim:
            allowed = f"divisors of d_inner (expand * d_model), {self.d_inner}"
            self._refuse("head_dim", self.head_dim, allowed)
        if self.n_heads % self.n_groups:
            allowed = f"divisors of the number of heads (d_inner / head_dim), {self.n_heads}"
            self._refuse("n_groups", self.n_groups, allowed)

    def _check_attention(self) -> None:
        """Raises ConfigError where the heads of an attention layer do not fit together."""
        if self.attn_kv_heads and self.attn_heads % self.attn_kv_heads:
            allowed = f"divisors of attn_heads, {self.attn_heads}, or 0"
            self._refuse("attn_kv_heads", self.attn_kv_heads, allowed)
        if self.attn_rotary_dim % 2 or self.attn_rotary_dim > self.attn_head_dim:
            allowed = f"even numbers up to attn_head_dim, {self.attn_head_dim}"
            self._refuse("attn_rotary_dim", self.attn_rotary_dim, allowed)

    def _resolved(self, entry: str, auto: frozenset[str]) -> str:
        """An entry, and in it what "auto" makes of its own options, where that is not the model's.

        auto   the fields of the model that were "auto"
        """
        _, config, _, follows = self._read_entry(entry, auto)
        changed = (n for n in sorted(follows & auto) if getattr(config, n) != getattr(self, n))
        return ":".join([entry, *(f"{name}={getattr(config, name)}" for name in changed)])

    def _read_entry(
        self, entry: str, auto: frozenset[str] = frozenset()
    ) -> tuple[str, MambaConfig, str, frozenset[str]]:
        """Type, configuration, name of what is shared, and fields taken from the model, of an entry
        such as "mamba:d_state=8:share=a". Fields in auto are resolved again, for the entry."""
        kind, *texts = (text.strip() for text in entry.split(":"))
        where = f"MambaConfig.layers: {entry!r}"
        if kind not in LAYER_TYPES:
            near = difflib.get_close_matches(kind, LAYER_TYPES, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{where}: no layer is of type {kind!r}; {hint}known: {', '.join(LAYER_TYPES)}"
            )
        options = {}
        for text in texts:
            name, equals, value = (part.strip() for part in text.partition("="))
            if not (equals and name and value):
                raise ConfigError(f"{where}: {text!r} is no option=value")
            options[name] = value
        mlp = options.get("mlp", self.mlp)
        has = [*LAYER_TYPES[kind], *MLP_TYPES.get(mlp, ())]
        whose = f"{where}: a layer of type {kind!r} with mlp {mlp!r}"
        check_keys(options, [*has, *_ANY_LAYER], whose)
        tag = options.pop("share", "")
        values: dict[str, Any] = dict.fromkeys(auto.intersection(has), "auto")
        values |= {name: _value(text) for name, text in options.items()}
        try:
            config = replace(self, layers=(), **values)
            if kind == "mamba2":
                config._check_heads()
            elif kind == "attention":
                config._check_attention()
            return kind, config, tag, frozenset(has) - options.keys()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @property
    def plain(self) -> str:
        """The type of all layers, where transformers has a model of nothing else; or ""."""
        kinds = set(self.layers)
        if self.mlp != "none" or len(kinds) > 1 or not kinds <= _KEYS.keys():
            return ""
        return self.layers[0]

    @property
    def auto_heads(self) -> int:
        """What attn_heads is where it is "auto"."""
        return -(-self.d_model // self.attn_head_dim)

    @property
    def d_inner(self) -> int:
        """Channels of the convolution and the scan."""
        return self.expand * self.d_model

    @property
    def n_heads(self) -> int:
        """Heads of a Mamba-2 layer."""
        return self.d_inner // self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to pad_vocab_size_multiple."""
        multiple = self.pad_vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple

    @classmethod
    def memory_engine(cls, **overrides: Any) -> Self:
        """The variant with zero-order hold, biases everywhere, and A_log clamped to (-10, 5)."""
        return cls.preset("memory_engine", **overrides)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """One of PRESETS: "memory_engine"; "jamba", where every eighth layer attends and all have
        an MLP; "zamba", where one block of attention and MLP serves after every sixth layer."""
        return cls.from_dict(preset_fields(name) | overrides)

    def to_json(self) -> str:
        """This configuration in this package's own dialect."""
        return json.dumps({"model_type": "wgsl_train", **self.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; reads the other dialects too."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"a model configuration is not JSON: {error}") from None
        return cls.from_hugging_face(values)

    def to_hugging_face(self) -> dict[str, Any]:
        """The contents of config.json, as transformers' MambaForCausalLM or Mamba2ForCausalLM reads it.

        What transformers has no key for stands under "wgsl_train". Where that would change the
        logits, model_type and hidden_act are ones that transformers does not know, so that it
        refuses the model rather than computing another one. Hybrids, which it cannot express at
        all, have all fields under this package's names.
        """
        kind = self.plain
        if not kind:
            refused = {"architectures": [], "hidden_act": f"silu in {HYBRID}"}
            return {"model_type": HYBRID, **refused, **self.to_dict()}
        refuse = any(getattr(self, n) != plain for n, plain in _CHANGES_LOGITS[kind].items())
        default = MambaConfig(self.vocab_size, self.d_model, self.n_layer)
        extra: dict[str, Any] = {
            name: getattr(self, name)
            for name in _without_key(kind)
            if getattr(self, name) != getattr(default, name)
        }
        if self.rescale_prenorm_residual:
            extra["rescale_prenorm_residual"] = True
        if self.pad_vocab_size_multiple != 1:
            extra["vocab_size"] = self.vocab_size
        known = {theirs: getattr(self, ours) for theirs, ours in _KEYS[kind].items()}
        config = {
            "architectures": [] if refuse else [_ARCHITECTURES[kind]],
            "model_type": _VARIANTS[kind] if refuse else kind,
            "hidden_act": f"silu in {_VARIANTS[kind]}" if refuse else "silu",
            **known,
            # it is about first weights only, but transformers draws out_proj anew where it is set,
            # also for a model that it loads
            "rescale_prenorm_residual": False,
            "vocab_size": self.padded_vocab_size,
            **self._derived(kind),
        }
        if config.get("time_step_limit") == default.time_step_limit:
            del config["time_step_limit"]  # older releases do not read the form of infinity
        if extra:
            config["wgsl_train"] = extra
        return _to_json(config)  # type: ignore[no-any-return]

    def _derived(self, kind: str) -> dict[str, int]:
        """By transformers' keys, sizes that others determine."""
        return (
            {"intermediate_size": self.d_inner} if kind == "mamba" else {"num_heads": self.n_heads}
        )

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """A configuration from the contents of a config.json, in any of these dialects: Hugging
        Face's, mamba_ssm's, and this package's own, of `to_json` and of hybrids.

        Raises ConfigError naming the key where one is missing, or asks for another model.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json holds {type(config).__name__}, not an object")
        kind = config.get("model_type")
        if kind == "wgsl_train":
            return cls.from_dict({k: v for k, v in config.items() if k != "model_type"})
        if kind == HYBRID:
            no_fields = ("model_type", "architectures", "hidden_act")
            return cls.from_dict({k: v for k, v in config.items() if k not in no_fields})
        if not (kind is None or isinstance(kind, str)) or (
            kind and kind not in _KEYS and kind not in _VARIANTS.values()
        ):
            known = " and ".join(map(repr, _KEYS))
            raise ConfigError(f"config.json: model_type is {kind!r}; only {known} are known")
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list):
            raise ConfigError(f"config.json: architectures is {architectures!r}, not a list")
        for name in architectures:
            if name not in (*_ARCHITECTURES.values(), "MambaLMHeadModel"):
                known = " and ".join(map(repr, _ARCHITECTURES.values()))
                raise ConfigError(
                    f"config.json: architectures names {name!r}; only {known} are known"
                )
        if kind is None and "hidden_size" not in config and "d_model" in config:
            return cls._from_mamba_ssm(config)
        return cls._from_transformers(config)

    @classmethod
    def _from_transformers(cls, config: Mapping[str, Any]) -> Self:
        variant = config.get("model_type") in _VARIANTS.values()
        kind = config.get("model_type") or "mamba"
        if variant:
            kind = next(k for k, name in _VARIANTS.items() if name == kind)
        # use_bias is among the needed keys because its default differs between releases
        _need(config, ["hidden_size", "num_hidden_layers", "vocab_size", "use_bias"])
        act = config.get("hidden_act", "silu")
        if act != "silu" and not variant:
            raise ConfigError(f"config.json: hidden_act is {act!r}; only 'silu' is known")
        if config.get("rms_norm", True) is not True:
            raise ConfigError(
                f"config.json: rms_norm is {config['rms_norm']!r}; only true is known"
            )
        given = {**_DEFAULTS[kind], **config}
        values = {ours: given[theirs] for theirs, ours in _KEYS[kind].items() if theirs in given}
        extra = config.get("wgsl_train", {})
        if not isinstance(extra, Mapping):
            raise ConfigError(f"config.json: wgsl_train is {extra!r}, not an object")
        allowed = [*_without_key(kind), "rescale_prenorm_residual", "vocab_size"]
        check_keys(extra, allowed, "config.json: wgsl_train")
        made = cls.from_dict({"layers": (kind,), **values, **extra})
        derived = made._derived(kind) | {"vocab_size": made.padded_vocab_size}
        for key, ours in derived.items():
            if given.get(key, ours) != ours:
                raise ConfigError(
                    f"config.json: {key} is {given[key]!r}, but the other keys make it {ours}"
                )
        return made

    @classmethod
    def _from_mamba_ssm(cls, config: Mapping[str, Any]) -> Self:
        _need(config, ["d_model", "n_layer", "vocab_size"])
        check_keys(config, _MAMBA_SSM, "config.json (in mamba_ssm's form)")
        ssm = config.get("ssm_cfg") or {}
        if not isinstance(ssm, Mapping):
            raise ConfigError(f"config.json: ssm_cfg is {ssm!r}, not an object")
        kind = _SSM_LAYERS.get(str(ssm.get("layer", "Mamba1")))
        if kind is None:
            known = " and ".join(map(repr, _SSM_LAYERS))
            raise ConfigError(
                f"config.json: ssm_cfg.layer is {ssm['layer']!r}; only {known} are known"
            )
        keys, ignored = _SSM_CFG[kind], ("layer", *_SSM_CFG_IGNORED[kind])
        fixed = _SSM_CFG_FIXED if kind == "mamba2" else {}
        check_keys(ssm, [*keys, *ignored, *fixed], "config.json: ssm_cfg")
        for where, key, value, only in (
            ("", "rms_norm", config.get("rms_norm", True), True),
            *(("ssm_cfg.", key, ssm.get(key, only), only) for key, only in fixed.items()),
        ):
            if value != only:
                raise ConfigError(f"config.json: {where}{key} is {value!r}; only {only!r} is known")
        values = {k: config[k] for k in ("d_model", "n_layer", "vocab_size")}
        values["pad_vocab_size_multiple"] = config.get("pad_vocab_size_multiple", 8)
        for key in ("residual_in_fp32", "tie_embeddings"):
            if key in config:
                values[key] = config[key]
        values |= _mamba_ssm_layers(config, kind)
        if kind == "mamba2":
            values["d_state"] = _DEFAULTS[kind]["state_size"]
        return cls.from_dict(values | {ours: ssm[k] for k, ours in keys.items() if k in ssm})


# What transformers calls the fields, by the type of the layers
_COMMON_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "state_size": "d_state",
    "conv_kernel": "d_conv",
    "expand": "expand",
    "time_step_rank": "dt_rank",
    "use_bias": "use_bias",
    "use_conv_bias": "use_conv_bias",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "residual_in_fp32": "residual_in_fp32",
    "initializer_range": "initializer_range",
    "rescale_prenorm_residual": "rescale_prenorm_residual",
    "time_step_min": "time_step_min",
    "time_step_max": "time_step_max",
    "time_step_floor": "time_step_floor",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
_KEYS = {
    "mamba": {**_COMMON_KEYS, "time_step_scale": "time_step_scale"},
    "mamba2": {
        **_COMMON_KEYS,
        "head_dim": "head_dim",
        "n_groups": "n_groups",
        "time_step_limit": "time_step_limit",
    },
}
_ARCHITECTURES = {"mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}
_VARIANTS = {"mamba": VARIANT, "mamba2": f"{VARIANT}2"}
# Its defaults where they are not those of the fields
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba2": {
        "num_heads": 128,
        "state_size": 128,
        "n_groups": 8,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    },
}
# Fields that it has no key for, and the values with which it computes
_CHANGES_LOGITS: dict[str, dict[str, Any]] = {
    "mamba": {
        "discretization": "euler",
        "a_log_clamp": None,
        "x_proj_bias": False,
        "lm_head_bias": False,
    },
    "mamba2": {"norm_per_group": True, "lm_head_bias": False},
}


def _without_key(kind: str) -> list[str]:
    """The fields that transformers has no key for, in a model whose layers are of this type."""
    expressed = {*_KEYS[kind].values(), "layers", "mlp"}
    return [f.name for f in fields(MambaConfig) if f.name not in expressed]


_MAMBA_SSM = [
    "d_model",
    "d_intermediate",
    "n_layer",
    "vocab_size",
    "ssm_cfg",
    "attn_layer_idx",
    "attn_cfg",
    "rms_norm",
    "residual_in_fp32",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "tie_embeddings",
    "architectures",
]
_SSM_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
_COMMON_SSM_CFG = {
    "d_state": "d_state",
    "d_conv": "d_conv",
    "expand": "expand",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
_SSM_CFG = {
    "mamba": {**_COMMON_SSM_CFG, "dt_rank": "dt_rank", "dt_scale": "time_step_scale"},
    "mamba2": {
        **_COMMON_SSM_CFG,
        "headdim": "head_dim",
        "ngroups": "n_groups",
        "dt_limit": "time_step_limit",
    },
}
_SSM_CFG_IGNORED = {  # of no effect on a trained model
    "mamba": ("dt_init", "use_fast_path"),
    "mamba2": ("A_init_range", "chunk_size", "conv_init", "use_mem_eff_path"),
}
_SSM_CFG_FIXED = {"d_ssm": None, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}


_ATTN_CFG = {
    "num_heads": "attn_heads",
    "num_heads_kv": "attn_kv_heads",
    "head_dim": "attn_head_dim",
    "rotary_emb_dim": "attn_rotary_dim",
    "rotary_emb_base": "attn_rope_theta",
    "qkv_proj_bias": "attn_bias",
}
_ATTN_CFG_ONLY = {
    "causal": True,
    "d_conv": 0,
    "mlp_dim": 0,
    "rotary_emb_interleaved": False,
    "softmax_scale": None,
}


def _mamba_ssm_layers(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Layers and MLPs of a configuration in mamba_ssm's form, as fields of ours.

    kind   type of the layers that do not attend
    """
    made = MambaConfig(**{name: config[name] for name in ("vocab_size", "d_model", "n_layer")})
    values: dict[str, Any] = {"layers": [kind]}
    if width := config.get("d_intermediate", 0):
        if not isinstance(width, int):
            raise ConfigError(f"config.json: d_intermediate is {width!r}, not an integer")
        values |= {"mlp": "swiglu", "d_ff": -(-width // 128) * 128}
    places, attn = config.get("attn_layer_idx") or [], config.get("attn_cfg") or {}
    if not isinstance(places, list) or any(i not in range(made.n_layer) for i in places):
        allowed = f"a list of numbers of layers, 0 to {made.n_layer - 1}"
        raise ConfigError(f"config.json: attn_layer_idx is {places!r}; allowed: {allowed}")
    if not places:
        return values
    if not isinstance(attn, Mapping):
        raise ConfigError(f"config.json: attn_cfg is {attn!r}, not an object")
    check_keys(attn, [*_ATTN_CFG, *_ATTN_CFG_ONLY, "out_proj_bias"], "config.json: attn_cfg")
    given = {"causal": False, "qkv_proj_bias": True, "out_proj_bias": True}
    given |= {key: value for key, value in attn.items() if value is not None}
    if "num_heads" not in given:
        raise ConfigError("config.json: attn_cfg has no 'num_heads'")
    if given["out_proj_bias"] != given["qkv_proj_bias"]:
        raise ConfigError("config.json: attn_cfg: qkv_proj_bias and out_proj_bias differ")
    for key, only in _ATTN_CFG_ONLY.items():
        if given.get(key, only) != only:
            raise ConfigError(
                f"config.json: attn_cfg.{key} is {given[key]!r}; only {only!r} is known"
            )
    values |= {ours: given[theirs] for theirs, ours in _ATTN_CFG.items() if theirs in given}
    if "head_dim" not in given:
        heads = replace(made, attn_heads=given["num_heads"]).attn_heads  # checked
        values["attn_head_dim"] = made.d_model // heads
    return values | {"layers": ["attention" if i in places else kind for i in range(made.n_layer)]}


def _need(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if key not in config:
            raise ConfigError(f"config.json has no {key!r}")


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """How a model is trained. Raises ConfigError naming field, value and allowed range.

    A step is an optimizer step: `gradient_accumulation` batches, or fewer at an epoch's end.

    lr                       peak learning rate; every step moves a weight by about this much
    schedule                 after the warm-up: "constant", or "linear" or "cosine" down to min_lr
    warmup_steps             steps in which the rate rises from 0 to lr
    min_lr                   rate at the end of the schedule
    beta1                    AdamW's average of the gradient: share of the old in it
    beta2                    AdamW's average of the squared gradient: share of the old in it
    eps                      added to AdamW's denominator
    weight_decay             decoupled: weights shrink by lr * weight_decay a step
    no_decay                 weights whose name matches such a pattern do not decay
    max_grad_norm            gradients are scaled down to this global L2 norm; 0: never
    max_delta                bound on one step's change of one weight, decay aside; 0: none
    train                    only weights whose name matches such a pattern train; by default all
    lora_rank                train a low-rank adapter of this rank, and nothing else; 0: none
    lora_alpha               the adapter counts lora_alpha / rank times
    lora_targets             weights that get an adapter: any projection's, conv1d, A_log,
                             embeddings (and with them a tied head), lm_head
    lora_base                storage of the frozen matrices under an adapter: "f32", "f16", or
                             "int8" with a factor a row, which are rounded (QLoRA); by default as
                             the model has them
    shard                    (index, count): update every count-th parameter from index on, no other
    steps                    optimizer steps of the whole run; or epochs
    epochs                   passes over the data; or steps
    batch_size               sequences in a batch
    seq_len                  tokens in a sequence
    gradient_accumulation    batches whose tokens are averaged in one step
    seed                     of the data's order and of new weights
    eval_fraction            part of the tokens, at the end, that is held out
    eval_every               steps between evaluations; 0: only at the end
    save_every               steps between checkpoints; 0: only at the end
    log_every                steps between lines of the log; metrics.jsonl has every step
    keep_checkpoints         how many of the newest are kept
    activation_checkpointing recompute each layer in the backward pass: less memory, more time
    carry_state              each row of a batch goes on, states included, where it was in the batch
                             before; gradients do not flow back into that one
    memory_budget            bytes of GPU memory that the plan may take; by default no bound
    max_skips                non-finite steps in a row after which training stops
    detect_anomaly           stop at the first step that is not finite, and name the kernel and the
                             tensor where it began; slower, since each step is waited for
    precision                storage of the activations that wait for the backward pass: "f32", or
                             "f16", which takes less memory; arithmetic and weights are f32
    """

    lr: float = _rule(1e-4, 0.0, 10.0)
    schedule: Literal["constant", "linear", "cosine"] = _rule(
        "constant", among=("constant", "linear", "cosine")
    )
    warmup_steps: int = _rule(0, 0)
    min_lr: float = _rule(0.0, 0.0, 10.0)
    beta1: float = _rule(0.9, 0.0, 0.999999)
    beta2: float = _rule(0.999, 0.0, 0.9999999)
    eps: float = _rule(1e-8, 1e-20, 1.0)
    weight_decay: float = _rule(0.01, 0.0, 10.0)
    no_decay: tuple[str, ...] = NO_DECAY
    max_grad_norm: float = _rule(1.0, 0.0, 3e38)
    max_delta: float = _rule(0.0, 0.0, 3e38)
    train: tuple[str, ...] = ()
    lora_rank: int = _rule(0, 0, 1 << 16)
    lora_alpha: float = _rule(16.0, 1e-6, 1e6)
    lora_targets: tuple[str, ...] = LORA_TARGETS
    lora_base: Literal["f32", "f16", "int8"] | None = _rule(None, among=("f32", "f16", "int8"))
    shard: tuple[int, int] | None = None
    steps: int | None = _rule(None, 1)
    epochs: int | None = _rule(None, 1)
    batch_size: int = _rule(8, 1, 1 << 20)
    seq_len: int = _rule(256, 1, 1 << 24)
    gradient_accumulation: int = _rule(1, 1, 1 << 20)
    seed: int = _rule(0, 0, (1 << 63) - 1)
    eval_fraction: float = _rule(0.0, 0.0, 0.9)
    eval_every: int = _rule(0, 0)
    save_every: int = _rule(0, 0)
    log_every: int = _rule(10, 1)
    keep_checkpoints: int = _rule(3, 1)
    activation_checkpointing: bool = False
    carry_state: bool = False
    memory_budget: int | None = _rule(None, 1)
    max_skips: int = _rule(50, 1)
    detect_anomaly: bool = False
    precision: Literal["f32", "f16"] = _rule("f32", among=("f32", "f16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"TrainConfig.steps is {self.steps} and epochs is {self.epochs}: set one of the two"
            )
        if not self.lora_targets:
            self._refuse("lora_targets", self.lora_targets, f"some of {', '.join(LORA_TARGETS)}")
        if self.lora_targets != LORA_TARGETS and not self.lora_rank:
            self._refuse("lora_rank", 0, "1 or more, where lora_targets are chosen")
        if self.lora_rank and self.train:
            self._refuse("train", self.train, "nothing, where an adapter trains (lora_rank)")
        if self.min_lr > self.lr:
            self._refuse("min_lr", self.min_lr, f"at most lr, {self.lr}")
        if self.steps is not None and self.warmup_steps > self.steps:
            self._refuse("warmup_steps", self.warmup_steps, f"at most steps, {self.steps}")

    @classmethod
    def write_through(cls, **overrides: Any) -> Self:
        """Narrow training of x_proj alone, of which no step moves a weight by more than 0.05."""
        return cls.from_dict(WRITE_THROUGH | overrides)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Optimizer steps of a whole run. An epoch's last, partial window is a step too.

        Raises ConfigError where neither steps nor epochs is set.
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise ConfigError("TrainConfig needs steps or epochs: how long shall it train?")
        return self.epochs * -(-batches_per_epoch // self.gradient_accumulation)

    def check_effect(self, names: Iterable[str]) -> None:
        """Raises ConfigError at the first of these fields that changes nothing beside the others."""
        needs = {
            "min_lr": ("schedule", "linear or cosine", self.schedule != "constant"),
            "lora_alpha": ("lora_rank", "1 or more", self.lora_rank),
            "eval_every": ("eval_fraction", "more than 0", self.eval_fraction),
        }
        for name in names:
            other, value, met = needs.get(name, ("", "", True))
            if getattr(self, name) and not met:
                raise ConfigError(
                    f"{name} has no effect: set {other} to {value}, or leave {name} out"
                )

    def decays(self, name: str) -> bool:
        """Whether the parameter of this name is subject to weight decay."""
        return not _matches(name, self.no_decay)

    def trained(self, names: Iterable[str]) -> frozenset[str]:
        """Which of these parameters train. Raises ConfigError where a pattern matches none."""
        names = list(names)
        for pattern in self.train:
            if not any(_matches(name, [pattern]) for name in names):
                kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
                self._refuse("train", pattern, f"patterns that match some of {', '.join(kinds)}")
        return frozenset(n for n in names if not self.train or _matches(n, self.train))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def load_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """The tables [model], [train] and [data] of a TOML file; an absent one is empty.

    [model] may have a preset, see `expand_preset`. Raises ConfigError naming an unknown table or
    key and the nearest valid one. What [data] may hold, and the values of the other two, is for
    their readers to check.
    """
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    check_keys(tables, ["model", "train", "data"], str(path))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is {table!r}, not a table")
    for name, cls in (("model", MambaConfig), ("train", TrainConfig)):
        known = [*(f.name for f in fields(cls)), *(["preset"] if name == "model" else [])]
        check_keys(tables.get(name, {}), known, f"{path}: [{name}]")
    return {name: tables.get(name, {}) for name in ("model", "train", "data")}
