"""Checks kernels against their oracles, and a whole model's gradients, at any sizes.

    python tools/gradcheck.py                                  every kernel, then the default model
    python tools/gradcheck.py scan_backward rms_norm_forward   at the cases of tests/oracle
    python tools/gradcheck.py linear_forward rows=7 d_out=64 d_in=64 x_stride=64 out_stride=64
    python tools/gradcheck.py model d_model=24 layers=mamba*3 discretization=zoh batch=3 seqlen=17

A kernel runs on the adapter beside its float64 oracle: each element must agree within the oracle's
rtol of its value plus the tensor's root mean square. Of a model, loss and the gradient of every
parameter are compared with tests/oracle_model.py, whose gradients are compared with central
differences of its loss along a random direction for each parameter. Exit status: 0; 1 where
something is wrong, or there is no such kernel, size or option; 3 where there is no such adapter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import harness  # noqa: E402
from tests.oracle_model import batch, lively, loss_and_grads, relative  # noqa: E402
from wgsl_train import MambaConfig, Model, request_device  # noqa: E402
from wgsl_train.config import check_keys  # noqa: E402
from wgsl_train.device import Device  # noqa: E402
from wgsl_train.encoder import Buffers  # noqa: E402
from wgsl_train.errors import ConfigError, DeviceError, WgslTrainError  # noqa: E402

Array = np.ndarray[Any, Any]

MODEL = "model"
SIZES = {"vocab_size": 37, "d_model": 20, "batch": 2, "seqlen": 9}  # which divide no tile
LOSS_RTOL = 1e-5
GRAD_RTOL = 1e-4  # of norms: |gradient - oracle's| <= GRAD_RTOL * |oracle's|
STEP = 1e-5  # of the central differences
SLOPE_RTOL = 1e-5
ROUNDING = 1e-15  # of a loss in float64


def check_kernel(
    name: str, given: Mapping[str, Any], buffers: Buffers, kind: str, leave_out: list[str] | None
) -> Iterator[str]:
    """Print a line a case; yields what is wrong."""
    if given or leave_out is not None:
        variants = [harness.variant_of(name, given, kind, leave_out)]
    else:
        variants = harness.variants(name, [kind])
    for variant in variants:
        for accumulate in [True, False] if variant.kernel.adds else [True]:
            how = "" if accumulate else ", overwriting"
            try:
                found = harness.examine(variant, buffers, np.random.default_rng(0), accumulate)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                if not given or isinstance(error, WgslTrainError):
                    raise
                raise ConfigError(
                    f"{name}'s oracle cannot compute {variant.case}: {error}. Sizes that follow "
                    "from others must be given too."
                ) from error
            line = f"{name} {variant.case}{how}: greatest relative error {found.error:.1e}"
            print(f"{'WRONG' if found.faults else 'ok   '} {line}")
            yield from (f"{name} {variant.case}{how}: {fault}" for fault in found.faults)


def check_model(given: Mapping[str, Any], device: Device) -> Iterator[str]:
    """Print a line a parameter; yields what is wrong."""
    values = {**SIZES, **given}
    if not {"layers", "n_layer"} & values.keys():
        values["n_layer"] = 2
    shape = values.pop("batch"), values.pop("seqlen")
    config = MambaConfig.from_dict(values)
    weights = lively(config)
    tokens, targets = batch(config, shape)
    model = Model(config, device)
    model.load_state_dict(weights)
    loss, grads = model.loss_and_grads(tokens, targets)
    exact, wanted, _ = loss_and_grads(config, weights, tokens, targets)
    off = abs(loss - exact) / max(abs(exact), 1e-12)
    print(f"{'ok   ' if off <= LOSS_RTOL else 'WRONG'} loss {loss:.6f}, oracle's {exact:.6f}")
    if not off <= LOSS_RTOL:
        yield f"loss is {loss}, expected {exact}: off by {off:.1e}, {LOSS_RTOL:.0e} is allowed"
    print(f"      {'parameter':44}{'|gradient|':>12}{'off oracle':>12}{'off slope':>12}")
    for name, want in wanted.items():
        norm = max(float(np.linalg.norm(want)), 1e-12)
        error = relative(grads[name], want)
        slope = slope_error(config, weights, tokens, targets, name, want)
        allowed = SLOPE_RTOL + ROUNDING * exact / STEP / norm
        ok = error <= GRAD_RTOL and slope <= allowed
        print(f"{'ok   ' if ok else 'WRONG'} {name:44}{norm:12.3e}{error:12.1e}{slope:12.1e}")
        if not error <= GRAD_RTOL:
            at = np.unravel_index(np.abs(grads[name] - want).argmax(), want.shape)
            yield (
                f"gradient of {name}{[int(i) for i in at]} is {grads[name][at]}, expected "
                f"{want[at]:.9g}; the tensor is off by {error:.1e}, {GRAD_RTOL:.0e} is allowed"
            )
        if not slope <= allowed:
            yield f"the oracle's gradient of {name} is {slope:.1e} off the slope of its loss"


def slope_error(
    config: MambaConfig,
    weights: Mapping[str, Array],
    tokens: Array,
    targets: Array,
    name: str,
    grad: Array,
) -> float:
    """How far the slope of the oracle's loss along a direction is off what the gradient says.

    Relative to the gradient's norm. The direction is the gradient's own, plus a random one of the
    same length, so that it is neither orthogonal to the gradient nor blind to what is.
    """
    noise = np.random.default_rng(0).standard_normal(grad.shape)
    size = max(float(np.linalg.norm(grad)), 1e-12)
    direction = grad / size + noise / np.linalg.norm(noise)
    start = weights[name].astype(np.float64)
    moved = ({**weights, name: start + sign * STEP * direction} for sign in (1, -1))
    up, down = (loss_and_grads(config, w, tokens, targets)[0] for w in moved)
    return float(abs((up - down) / (2 * STEP) - (grad * direction).sum()) / size)


def main() -> int:
    """Check what the command line names; the number of faults decides the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="KERNEL|model|NAME=VALUE", help="what, and at which sizes"
    )
    parser.add_argument("--device", help="adapter: index or part of its name")
    parser.add_argument(
        "--kind", choices=harness.KINDS, help="tuning choices of this kind of adapter"
    )
    parser.add_argument(
        "--leave-out", nargs="*", metavar="BINDING", help="optional bindings that are not bound"
    )
    args = parser.parse_intermixed_args()
    names = [word for word in args.words if "=" not in word]
    try:
        given = harness.settings(word for word in args.words if "=" in word)
        check_keys(names, [*harness.KERNELS, MODEL], "wgsl_train/ops")
        if given and len(names) != 1:
            raise ConfigError("sizes and options are those of one kernel, or of the model: name it")
        device = request_device(args.device, quiet=True)
        print(f"adapter {device}")
        buffers, faults = Buffers(device), []
        for name in names or [*sorted(harness.KERNELS), MODEL]:
            if name == MODEL:
                faults += check_model(given, device)
            else:
                kind = args.kind or device.target.kind
                faults += check_kernel(name, given, buffers, kind, args.leave_out)
    except WgslTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, DeviceError) else 1
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
