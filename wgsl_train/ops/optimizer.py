"""AdamW with clipping by the global norm, a schedule and a guard, all decided on the GPU.

Nothing is read back to take a step: the norm, the clip factor, the learning rate, the step
counter and the decision to skip live in small tensors, and a ring of log rows is read when
somebody wants to look.
"""

import math
from dataclasses import dataclass

from ..errors import ShapeError
from ..kernel import Kernel, Tensor, by_kind, ceil_div, spread
from ..plan import BLOCK, Plan

# What the host writes once, as f32, in this order.
HYPER = (
    "lr",  # at the top of the schedule
    "min_lr",  # at its end
    "warmup_steps",
    "total_steps",  # steps until min_lr, warm-up counted
    "schedule",  # index of SCHEDULES
    "ln_beta1",
    "ln_beta2",
    "one_minus_beta1",
    "one_minus_beta2",
    "eps",
    "weight_decay",
    "max_grad_norm",  # 0: no clipping
    "max_delta",  # the most one step moves a weight; 0: no limit
)
SCHEDULES = ("constant", "linear", "cosine")  # after the warm-up
STATE = ("steps", "calls", "skipped_in_a_row", "skipped")
CONTROL = ("grad_scale", "lr", "one_minus_beta1_t", "one_minus_beta2_t", "skip")
LOG = ("loss", "grad_norm", "lr", "skipped", "loss_scale")

# What gradients are multiplied by where activations are stored as f16: a power of 2, halved where
# a gradient is not finite, doubled after so many steps in a row without
LOSS_SCALE = ("scale", "clean_steps", "overflows")
INITIAL_SCALE = 65536.0
GROW_AFTER = 200  # steps
MAX_SCALE = 2.0**24

GRAD_NORM_BLOCKS = Kernel(
    "grad_norm_blocks",
    reads={"grads": "n"},
    writes={"block_sums": "total_blocks four"},
    options={"first_block": 0},
    choose=by_kind({"workgroup": 256, "lanes": 32}, cpu={"workgroup": 16, "lanes": 1}),
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "lanes": lanes} for workgroup in (64, 256) for lanes in (1, 16, 64)
    ],
    grid=lambda v: spread(ceil_div(v["n"] // BLOCK, v["workgroup"] // v["lanes"])),
    vec4=lambda v: ("grads", "block_sums"),
    flops=lambda v: 2 * v["n"],
    traffic=lambda v: 4 * v["n"],
)

STEP_CONTROL = Kernel(
    "step_control",
    reads={"block_sums": "total_blocks four", "hyper": "n_hyper", "loss": "one"},
    writes={
        "state": "n_state",
        "control": "n_control",
        "log": "capacity fields",
        "loss_scale?": "n_scale",
    },
    options={
        "hyper_names": HYPER,
        "pi": math.pi,
        "grow_after": GROW_AFTER,
        "max_scale": MAX_SCALE,
    },
    choose=by_kind({"workgroup": 256, "unroll": 8}, cpu={"workgroup": 16, "unroll": 1}),
    grid=lambda v: (1, 1, 1),
    vec4=lambda v: ("block_sums",),
    u32=frozenset({"state"}),
)

ADAMW = Kernel(
    "adamw",
    reads={"grads": "n", "control": "n_control", "hyper": "n_hyper", "decay": "n_blocks"},
    writes={"params": "n", "m": "n", "v": "n"},
    options={"hyper_names": HYPER},
    grid=lambda v: spread(ceil_div(v["n"] // 4, v["workgroup"])),
    vec4=lambda v: ("grads", "params", "m", "v"),
    u32=frozenset({"decay"}),
    flops=lambda v: 16 * v["n"],
    traffic=lambda v: 28 * v["n"],
)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's persistent tensors.

    hyper     (len(HYPER),) f32, written by the host
    state     (len(STATE),) u32: counters; zeros at the start of a run
    control   (len(CONTROL),) f32: what the last call decided
    log       (capacity, len(LOG)) f32: row c % capacity is that of call c, counted from 0. The
              norm is the one before clipping, of the finite elements alone; a skipped call shows
              the lr that its step would have had
    loss_scale   (len(LOSS_SCALE),) f32, written by the host at the start of a run; None: not scaled
    """

    hyper: Tensor
    state: Tensor
    control: Tensor
    log: Tensor
    loss_scale: Tensor | None


def optimizer(plan: Plan, capacity: int = 1024, loss_scale: Tensor | None = None) -> Optimizer:
    """Plan one optimizer step, in the section "update", over all trained parameters.

    The norm is that of all gradients; the parameters updated are those of the layout's shard.

    Reads the tensor named `loss`, (1,) f32 and planned before, for the log. capacity
    is in calls. Raises ShapeError where nothing trains.

    The step is AdamW's (Loshchilov & Hutter 2019), decay decoupled and by `Page.decay`, on
    gradients scaled by min(1, max_grad_norm / norm). A call that finds a non-finite gradient or norm
    moves nothing, and does not count as a step.

    loss_scale   persistent (len(LOSS_SCALE),) f32: gradients arrive multiplied by its scale, which
                 is taken out again (of the logged norm too) and then brought up to date. Source:
                 Micikevicius et al., "Mixed Precision Training" (2018)
    """
    pages = plan.layout.trained_pages
    if not pages:
        raise ShapeError("optimizer: no parameter is trained")
    plan.section = "update"
    n_blocks = [page.params.size // BLOCK for page in pages]
    found = Optimizer(
        plan.persistent("hyper", (len(HYPER),)),
        plan.persistent("optimizer_state", (len(STATE),), "u32"),
        plan.persistent("control", (len(CONTROL),)),
        plan.persistent("log", (capacity, len(LOG))),
        loss_scale,
    )
    block_sums = plan.tensor("block_sums", (sum(n_blocks), 4))
    for i, page in enumerate(pages):
        plan.dispatch(
            GRAD_NORM_BLOCKS,
            grads=page.grads,
            block_sums=block_sums,
            first_block=sum(n_blocks[:i]),
        )
    plan.dispatch(
        STEP_CONTROL,
        block_sums=block_sums,
        hyper=found.hyper,
        loss=plan["loss"],
        state=found.state,
        control=found.control,
        log=found.log,
        loss_scale=loss_scale,
    )
    for i, page in enumerate(pages):
        for j, run in enumerate(page.runs):
            blocks = slice(run.first // BLOCK, (run.first + run.size) // BLOCK)
            plan.dispatch(
                ADAMW,
                grads=page.grads.view(run.first, (run.size,)),
                control=found.control,
                hyper=found.hyper,
                decay=plan.constant(f"decay.{i}.{j}", page.decay[blocks]),
                params=page.params.view(run.first, (run.size,)),
                m=page.m.view(run.moment, (run.size,)),
                v=page.v.view(run.moment, (run.size,)),
            )
    return found
