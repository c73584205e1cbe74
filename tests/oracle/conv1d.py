import numpy as np

from . import case, documents, oracle


def before(values, d_conv):
    """Each timestep's value and the d_conv - 1 before it, zeros at first: (batch, seqlen, d_conv)."""
    padded = np.pad(values, [(0, 0), (d_conv - 1, 0)])
    return np.lib.stride_tricks.sliding_window_view(padded, d_conv, axis=1)


def own(documents, d_conv):
    """Whether what each tap sees is of the timestep's own document: (batch, seqlen, 1, d_conv)."""
    return (before(documents, d_conv) == documents[..., None])[:, :, None]


def windows(x, x_start, d_inner, d_conv, state, documents):
    """The columns with the d_conv - 1 inputs before them, as (batch, seqlen, d_inner, d_conv)."""
    x = x[..., x_start : x_start + d_inner]
    if state is None:
        state = np.zeros((x.shape[0], d_conv - 1, d_inner))
    padded = np.concatenate([state, x], 1)
    x = np.lib.stride_tricks.sliding_window_view(padded, d_conv, axis=1)
    return x if documents is None else x * own(documents, d_conv)


def pre_activation(x, x_start, weight, bias, state=None, documents=None):
    x = windows(x, x_start, weight.shape[0], weight.shape[2], state, documents)
    return (x * weight[:, 0]).sum(-1) + (0 if bias is None else bias), x


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


@oracle(
    case(batch=2, seqlen=37, d_inner=5, x_stride=11, x_start=4, d_conv=4, one=1, context=3),
    case(
        batch=2,
        seqlen=70,
        d_inner=12,
        x_stride=28,
        x_start=12,
        d_conv=3,
        one=1,
        leave_out=("state", "documents"),
    ),
    case(
        batch=1,
        seqlen=2,
        d_inner=300,
        x_stride=600,
        d_conv=5,
        one=1,
        context=4,
        leave_out=("bias",),
    ),
    case(
        batch=3,
        seqlen=33,
        d_inner=8,
        x_stride=16,
        d_conv=1,
        one=1,
        leave_out=("bias", "state", "documents"),
    ),
    case(
        batch=3,
        seqlen=66,
        d_inner=16,
        x_stride=32,
        d_conv=4,
        one=1,
        leave_out=("state",),
    ),
    case(batch=2, seqlen=21, d_inner=5, x_stride=10, d_conv=9, one=1, context=8),
    case(
        ("state", "documents"),
        batch=2,
        seqlen=9,
        d_inner=5,
        x_stride=11,
        x_start=4,
        d_conv=4,
        one=1,
        half=("x", "u"),
    ),
    case(
        ("state", "documents"),
        batch=2,
        seqlen=9,
        d_inner=8,
        x_stride=16,
        x_start=4,
        d_conv=4,
        one=1,
        half=("x", "u"),
    ),
    draw={"documents": documents},
)
def conv1d_silu_forward(x, weight, bias, state, documents, x_start):
    pre, _ = pre_activation(x, x_start, weight, bias, state, documents)
    return {"u": pre * sigmoid(pre)}


@oracle(
    case(("initial", "documents"), batch=2, seqlen=5, d_inner=7, x_stride=14, x_start=7, context=3),
    case(("initial", "documents"), batch=2, seqlen=1, d_inner=150, x_stride=300, context=3),
    case(("initial", "documents"), batch=1, seqlen=4, d_inner=4, x_stride=8, context=4),
    case(("documents",), batch=2, seqlen=2, d_inner=5, x_stride=10, context=3),
    case(("documents",), batch=2, seqlen=5, d_inner=5, x_stride=11, context=3, half=("x",)),
    case(batch=9, seqlen=2, d_inner=5, x_stride=10, context=3),
    case(batch=9, seqlen=6, d_inner=5, x_stride=10, context=3),
    draw={"documents": documents},
)
def conv1d_silu_state(x, state, initial, documents, x_start):
    context, d_inner = state.shape[1:]
    x = x[..., x_start : x_start + d_inner]
    left = np.concatenate([state if initial is None else initial, x], 1)
    if documents is not None:
        own = np.pad(documents, [(0, 0), (context, 0)]) == documents[:, -1:]
        left = left * own[..., None]
    return {"state": left[:, -context:]}


@oracle(
    case(
        batch=2, seqlen=37, d_inner=5, x_stride=10, d_conv=4, one=1, run=16, n_partials=6 * 128,
        weight_stride=64, bias_stride=64, leave_out=("documents", "state"),
    ),
    case(
        batch=2, seqlen=21, d_inner=5, x_stride=10, d_conv=9, one=1, run=16, context=8,
        n_partials=4 * 128, weight_stride=64, bias_stride=64,
    ),
    case(
        batch=2, seqlen=70, d_inner=24, x_stride=56, x_start=28, d_conv=3, one=1, run=64,
        context=2, n_partials=4 * 192, weight_stride=128, bias_stride=64,
    ),
    case(
        batch=1, seqlen=3, d_inner=300, x_stride=602, x_start=1, d_conv=5, one=1, run=64,
        n_partials=1536, weight_stride=1536, leave_out=("bias", "state"),
    ),
    case(
        batch=2, seqlen=17, d_inner=8, x_stride=16, d_conv=1, one=1, run=16, n_partials=4 * 64,
        bias_stride=64, leave_out=("documents", "state"),
    ),
    case(
        batch=2, seqlen=41, d_inner=16, x_stride=32, d_conv=4, one=1, run=16,
        leave_out=("state", "partials"),
    ),
    case(
        batch=2, seqlen=2, d_inner=5, x_stride=10, d_conv=4, one=1, run=16, context=3,
        n_partials=2 * 128, weight_stride=64, bias_stride=64, leave_out=("documents",),
    ),
    *(
        case(
            ("documents", "state"), batch=2, seqlen=19, d_inner=d, x_stride=20, x_start=4, d_conv=4,
            one=1, run=16, n_partials=4 * 128, weight_stride=64, bias_stride=64, half=half,
        )
        for d, half in ((5, ("x", "dx")), (8, ("x", "dx")), (8, ("du", "x", "dx")))
    ),
    draw={"documents": documents},
)  # fmt: skip
def conv1d_silu_backward(
    du, x, weight, bias, state, documents, partials, x_start, run, weight_stride, bias_stride
):
    d_inner, _, d_conv = weight.shape
    batch, seqlen, _ = x.shape
    dx = np.full(x.shape, np.nan)
    dpre, x, dpadded = gradients(du, x, x_start, weight, bias, state, documents)
    dx[..., x_start : x_start + d_inner] = dpadded[:, d_conv - 1 :]
    result = {"dx": dx}
    if partials is not None:
        runs = [(b, slice(t, t + run)) for b in range(batch) for t in range(0, seqlen, run)]
        sums = np.full(partials.shape, np.nan)
        for i, at in enumerate(runs):
            if weight_stride:
                dweight = (dpre[at][..., None] * x[at]).sum(0).ravel()
                sums[i * weight_stride :][: dweight.size] = dweight
            if bias_stride:
                first = len(runs) * weight_stride + i * bias_stride
                sums[first : first + d_inner] = dpre[at].sum(0)
        result["partials"] = sums
    return result


def gradients(du, x, x_start, weight, bias, state, documents):
    """Gradients before the SiLU, what each timestep sees, and the gradient of state and x."""
    d_inner, _, d_conv = weight.shape
    batch, seqlen, _ = x.shape
    pre, x = pre_activation(x, x_start, weight, bias, state, documents)
    s = sigmoid(pre)
    dpre = du * s * (1 + pre * (1 - s))
    dpadded = np.zeros((batch, seqlen + d_conv - 1, d_inner))
    for k in range(d_conv):
        same = 1 if documents is None else own(documents, d_conv)[..., k]
        dpadded[:, k : k + seqlen] += dpre * weight[:, 0, k] * same
    return dpre, x, dpadded


@oracle(
    case(batch=9, seqlen=7, d_inner=5, x_stride=12, x_start=6, d_conv=4, one=1, context=3),
    case(batch=9, seqlen=2, d_inner=5, x_stride=5, d_conv=4, one=1, context=3,
         leave_out=("bias",)),
    case(batch=2, seqlen=2, d_inner=40, x_stride=80, d_conv=5, one=1, context=4,
         leave_out=("documents",)),
    draw={"documents": documents},
)  # fmt: skip
def conv1d_silu_backward_state(du, x, weight, bias, state, documents, dfinal, x_start):
    context, seqlen = state.shape[1], x.shape[1]
    dstate = gradients(du, x, x_start, weight, bias, state, documents)[2][:, :context]
    kept = np.ones(len(x)) if documents is None else documents[:, -1] == 0
    if seqlen < context:
        dstate[:, seqlen:] += dfinal[:, : context - seqlen] * kept[:, None, None]
    return {"dstate": dstate}


@oracle(
    case(batch=9, seqlen=7, d_inner=5, x_stride=12, x_start=6, context=3),
    case(batch=9, seqlen=2, d_inner=5, x_stride=5, context=3),
    case(batch=2, seqlen=4, d_inner=40, x_stride=80, context=4, leave_out=("documents",)),
    draw={"documents": documents},
)
def conv1d_silu_state_backward(dx, dfinal, documents, x_start):
    (batch, seqlen, _), (_, context, d_inner) = dx.shape, dfinal.shape
    out = np.full(dx.shape, np.nan)
    count = min(seqlen, context)
    own = np.ones((batch, seqlen)) if documents is None else documents == documents[:, -1:]
    columns = slice(x_start, x_start + d_inner)
    added = dfinal[:, context - count :] * own[:, -count:, None]
    out[:, -count:, columns] = dx[:, -count:, columns] + added
    return {"dx": out}
