"""The language model's head and loss, without ever holding the logits of a whole batch."""

from ..kernel import Kernel, Target, Tensor, Values, by_kind, ceil_div, spread
from ..plan import Plan
from .linear import (
    Columns,
    plan_backward,
    plan_backward_a,
    plan_backward_b,
    plan_forward,
    plan_low,
)
from .sum_partials import sum_partials

IGNORED = 2**32 - 100  # a target that is not counted: -100 as u32


def _choices(target: Target, v: Values) -> dict[str, int]:
    """lanes: how many share a row."""
    if target.kind == "cpu":
        return {"workgroup": 16, "lanes": 1}
    return {"workgroup": 256, "lanes": 256 if v["vocab_size"] >= 4096 else 32}


CROSS_ENTROPY = Kernel(
    "cross_entropy",
    reads={"targets": "*rows", "batch_scale": "one", "loss_scale?": "n_scale"},
    writes={"logits": "*rows vocab_size", "row_loss": "*rows"},
    options={"gradient": True},  # False: the logits stay
    choose=_choices,
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "lanes": lanes} for workgroup in (64, 256) for lanes in (1, 16, 64)
    ],
    grid=lambda v: spread(ceil_div(v["rows"], v["workgroup"] // v["lanes"])),
    vec4=lambda v: ("logits",) if v["vocab_size"] % 4 == 0 else (),
    u32=frozenset({"targets"}),
    flops=lambda v: 8 * v["rows"] * v["vocab_size"],
    traffic=lambda v: (12 if v["gradient"] else 4) * v["rows"] * v["vocab_size"],
)

ROW_RANK = Kernel(
    "row_rank",
    reads={"targets": "*rows", "logits": "*rows vocab_size"},
    writes={"row_rank": "*rows"},
    choose=_choices,
    grid=lambda v: spread(ceil_div(v["rows"], v["workgroup"] // v["lanes"])),
    vec4=lambda v: ("logits",) if v["vocab_size"] % 4 == 0 else (),
    u32=frozenset({"targets"}),
    flops=lambda v: v["rows"] * v["vocab_size"],
)

LOSS_SUM = Kernel(
    "loss_sum",
    reads={"row_loss": "*rows"},
    adds={"loss": "one"},
    choose=by_kind({"workgroup": 256}, cpu={"workgroup": 16}),
    grid=lambda v: (1, 1, 1),
)


def chunk_rows(target: Target, vocab_size: int) -> int:
    """How many rows of logits exist at a time: a multiple of 64."""
    budget = min(target.usable_binding, (256 if target.kind == "discrete" else 64) << 20)
    return max(64, budget // (4 * vocab_size) // 64 * 64)


def _logits(plan: Plan, x: Tensor, head: str, bias: str | None, logits: Tensor) -> Tensor | None:
    """Plan logits = x headᵀ + bias, a piece of the head at a time.

    Returns `low` of the head's adapter, if it has one; see `plan_low`.
    """
    shift, low = None if bias is None else plan.param(bias), None
    for first_row, piece in plan.layout.pieces[head]:
        n = piece.shape[0]
        out, b = Columns(logits, first_row, n), shift and shift.view(first_row, (n,))
        adapter = plan.layout.adapters.get(piece)
        if adapter and not low:
            low = plan_low(plan, x, adapter, "logits_low")
        plan_forward(plan, x, piece, out, b, low=low, B=adapter.b if adapter else None)
    return low


def head_logits(plan: Plan, x: Tensor, head: str, bias: str | None = None) -> list[Tensor]:
    """Logits for the host to read; for inference, no backward.

    x (..., d_model) f32; head and bias are names of parameters (vocab_size, d_model) and
    (vocab_size,). Returns (rows, vocab_size) f32 in chunks of rows that one binding holds.
    """
    rows, vocab_size = x.size // x.shape[-1], plan.layout.specs[head].shape[0]
    chunk, chunks = chunk_rows(plan.target, vocab_size), list[Tensor]()
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        chunks.append(plan.tensor("logits", (stop - start, vocab_size)))
        _logits(plan, x.rows(start, stop), head, bias, chunks[-1])
    plan.keep += chunks
    return chunks


def language_model_loss(
    plan: Plan,
    x: Tensor,
    targets: Tensor,
    batch_scale: Tensor,
    loss: Tensor,
    head: str,
    bias: str | None = None,
    loss_scale: Tensor | None = None,
    name: str = "loss",
) -> tuple[Tensor, Tensor | None]:
    """Add to loss the cross-entropy, in nats, of logits = x headᵀ + bias against the targets.

    x (..., d_model) f32; targets (...) u32, those that are IGNORED count nothing, the others are
    checked against vocab_size by the caller; batch_scale (1,) f32, what each row's loss is
    multiplied by: 1 / the number of counted targets of the whole step; loss (1,) f32; head and
    bias are names of parameters (vocab_size, d_model) and (vocab_size,); the gradients, and not
    the losses, are multiplied by the first element of loss_scale f32 too.

    Returns two tensors (rows,) f32: the loss of each row, times batch_scale; and, unless the plan
    trains, the target's rank: how many logits are above its own, -1 where it is IGNORED.

    A chunk of rows at a time: where the plan trains, its gradients follow its logits at once, in
    the forward section, so that the logits need not be kept or computed twice.
    """
    rows, vocab_size = targets.size, plan.layout.specs[head].shape[0]
    row_loss = plan.tensor(f"{name}_of_rows", (rows,))
    row_rank = None if plan.training else plan.tensor("rank_of_rows", (rows,))
    chunk = chunk_rows(plan.target, vocab_size)
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        with plan.scope(f"{name}.{start}"):
            logits = plan.tensor("logits", (stop - start, vocab_size))
            low = _logits(plan, x.rows(start, stop), head, bias, logits)
            plan.dispatch(
                CROSS_ENTROPY,
                targets=targets.view(start, (stop - start,)),
                batch_scale=batch_scale,
                loss_scale=loss_scale,
                logits=logits,
                row_loss=row_loss.view(start, (stop - start,)),
                gradient=plan.training,
            )
            if row_rank:
                plan.dispatch(
                    ROW_RANK,
                    targets=targets.view(start, (stop - start,)),
                    logits=logits,
                    row_rank=row_rank.view(start, (stop - start,)),
                )
            else:
                _backward(plan, x, start, stop, head, bias, logits, low)
    plan.dispatch(LOSS_SUM, row_loss=row_loss, loss=loss)
    return row_loss, row_rank


def _backward(
    plan: Plan,
    x: Tensor,
    start: int,
    stop: int,
    head: str,
    bias: str | None,
    dlogits: Tensor,
    low: Tensor | None,
) -> None:
    """Plan the gradients of x's rows, the head, its adapter and the bias."""
    dx = plan.grad(x).rows(start, stop)
    dshift = None if bias is None else plan.layout.grad(plan.param(bias))
    pieces = plan.layout.pieces[head]
    for first_row, piece in pieces:
        n = piece.shape[0]
        dout, last = Columns(dlogits, first_row, n), piece is pieces[-1][1]
        adapter, dlow = plan.layout.adapters.get(piece), None
        if adapter and low:
            plan_backward_b(plan, dout, low, adapter)
            dlow = plan_backward_a(plan, x.rows(start, stop), low, adapter) if last else None
        dweight = plan.layout.grad(piece)
        dbias = dshift and dshift.view(first_row, (n,))
        if dbias and not dweight:  # rare; the kernel makes both
            dweight = plan.tensor(f"unused_dhead.{first_row}", piece.shape)
        a = adapter.a if adapter and dlow else None
        plan_backward(plan, dout, x.rows(start, stop), piece, dx, dweight, dbias, dlow, a)
    sum_partials(plan)
