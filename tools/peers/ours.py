"""The side that the peers stand beside: training steps and kernels of wgsl_train."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from measure import ADAMW, Case, Peer, Work, until

import wgsl_train
from wgsl_train import MambaConfig, Model, TrainConfig, Trainer, request_device
from wgsl_train.config import LAYER_TYPES
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.kernel import Tensor
from wgsl_train.ops import linear, probe
from wgsl_train.ops.selective_scan import selective_scan
from wgsl_train.ops.sum_partials import sum_partials
from wgsl_train.plan import Layout, ParamSpec, Plan


class Dispatches(Work):
    """A section of a plan, timed by the GPU's own clock where it has one.

    values    what a run leaves, to compare
    prepare   writes inputs that a run changes
    """

    def __init__(
        self,
        encoder: Encoder,
        section: str,
        values: Callable[[], dict[str, Any]],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.encoder, self.section, self.prepare = encoder, section, prepare
        super().__init__(
            start=self._run,
            wait=lambda _: encoder.device.wait(),
            values=lambda _: values(),
        )

    def _run(self) -> None:
        self.prepare()
        self.encoder.run(self.section)

    def seconds(self, budget: float, warm_up: float) -> float:
        if "timestamp-query" not in self.encoder.device.target.features:
            return super().seconds(budget, warm_up)
        for _ in until(warm_up):
            self.wait(self._run())
        samples = []
        for _ in until(budget, at_least=3):
            self._run()  # so that the clock is still up
            samples.append(sum(t.seconds for t in self.encoder.time(self.section)))
        return statistics.median(samples)


class Ours(Peer):
    """wgsl_train, on the adapter that WGSL_TRAIN_ADAPTER names, else the best one."""

    layers = tuple(LAYER_TYPES)

    def __init__(self) -> None:
        self._buffers: Buffers | None = None

    def about(self) -> dict[str, Any]:
        versions = {"wgsl-train": wgsl_train.__version__, "wgpu": version("wgpu")}
        device = request_device(quiet=True)
        info = device.info
        return {
            "versions": versions,
            "device": info.name,
            "kind": info.kind,
            "backend": info.backend,
            "driver": info.driver,
            "largest_binding": device.target.usable_binding,
        }

    def gpu_bytes(self) -> int | None:
        return self._buffers.nbytes if self._buffers else None

    def step(self, case: Case) -> dict[str, Work]:
        model = Model(MambaConfig(**case.model), request_device(quiet=True))
        model.load_state_dict(case.weights)
        self._buffers = model.buffers
        trainer = Trainer(
            model,
            TrainConfig(
                steps=1_000_000,
                no_decay=(),
                activation_checkpointing=case.activation_checkpointing,
                **{name: getattr(case, name) for name in ADAMW},
            ),
        )
        targets = np.full(case.tokens.shape, -100)
        targets[:, :-1] = case.tokens[:, 1:]
        return {
            "step": Work(
                start=lambda: trainer.step(case.tokens, targets),
                wait=lambda result: result.loss,
                values=lambda result: {"loss": result.loss},
            )
        }

    def matmul(self, case: Case) -> dict[str, Work]:
        device, shape = request_device(quiet=True), (case.n, case.n)
        buffers = self._buffers = Buffers(device)
        layout = Layout([ParamSpec("weight", shape)], device.target)
        weight = layout.param("weight")
        dweight = layout.grad(weight)
        assert dweight is not None

        def work(name: str, plan_it: Callable[[Plan, Tensor, Tensor, Tensor], None]) -> Work:
            """One product: `plan_it` plans it from x, dy and the tensor `name` for its result."""
            plan = Plan(layout, device.target)
            x, dy = plan.persistent("x", shape), plan.persistent("dy", shape)
            out = dweight if name == "dweight" else plan.tensor(name, shape)
            plan_it(plan, x, dy, out)
            sum_partials(plan)
            encoder = Encoder(buffers, plan)
            for tensor, array in zip((x, dy, weight), inputs, strict=True):
                buffers.write(tensor, array)
            return Dispatches(encoder, "forward", lambda: {name: encoder.read(out)})

        drawn = case.matmul_inputs()
        inputs = [drawn[name] for name in ("x", "dy", "weight")]
        return {
            "x_wt": work("out", lambda p, x, dy, out: linear.plan_forward(p, x, weight, out)),
            "dy_w": work("dx", lambda p, x, dy, dx: linear.plan_backward_x(p, dy, weight, dx)),
            "dyt_x": work(
                "dweight", lambda p, x, dy, dw: linear.plan_backward_weight(p, dy, x, dw)
            ),
        }

    def scan(self, case: Case) -> dict[str, Work]:
        drawn, target = case.scan_inputs(), request_device(quiet=True).target
        batch, seqlen, d_inner, d_state = case.batch, case.seqlen, case.d_inner, case.d_state
        dt_rank = 4  # columns of x_dbl beside B and C; any will do
        layout = Layout(
            [ParamSpec("A_log", (d_inner, d_state)), ParamSpec("D", (d_inner,))], target
        )
        A_log, D = layout.param("A_log"), layout.param("D")
        plan = Plan(layout, target)
        u, delta = (plan.persistent(n, (batch, seqlen, d_inner)) for n in ("u", "delta"))
        xz = plan.persistent("xz", (batch, seqlen, 2 * d_inner))
        x_dbl = plan.persistent("x_dbl", (batch, seqlen, dt_rank + 2 * d_state))
        g = selective_scan(plan, u, delta, x_dbl, xz, A_log, D, dt_rank=dt_rank, d_state=d_state)
        plan.backward()
        self._buffers = Buffers(request_device(quiet=True))
        encoder = Encoder(self._buffers, plan, share_memory=False)
        dt = np.zeros((batch, seqlen, dt_rank))
        for tensor, parts in (
            (u, [drawn["u"]]),
            (delta, [drawn["delta"]]),
            (x_dbl, [dt, drawn["B"], drawn["C"]]),
            (xz, [drawn["z"], drawn["z"]]),
            (A_log, [drawn["A_log"]]),
            (D, [drawn["D"]]),
        ):
            encoder.write(tensor, np.concatenate(parts, -1))

        def gradients() -> dict[str, Any]:
            def read(of: Tensor, *columns: int) -> list[Any]:
                return np.split(encoder.read(plan.grad(of)), columns, -1)

            (du,), (ddt,) = read(u), read(delta)
            _, dB, dC = read(x_dbl, dt_rank, dt_rank + d_state)
            _, dz = read(xz, d_inner)
            params = {f"d{p.name}": encoder.read(layout.grad(p)) for p in (A_log, D)}
            return {"du": du, "ddt": ddt, "dB": dB, "dC": dC, "dz": dz, **params}

        return {
            "forward": Dispatches(encoder, "forward", lambda: {"g": encoder.read(g)}),
            "backward": Dispatches(
                encoder, "backward", gradients, lambda: encoder.write(plan.grad(g), drawn["dg"])
            ),
        }

    def copy(self, case: Case) -> dict[str, Work]:
        device = request_device(quiet=True)
        plan = Plan(Layout([], device.target), device.target)
        x, out = plan.persistent("x", (case.n,)), plan.tensor("out", (case.n,))
        plan.dispatch(probe.COPY, x=x, out=out)
        self._buffers = Buffers(device)
        encoder = Encoder(self._buffers, plan)
        encoder.write(x, case.copy_input())
        return {"copy": Dispatches(encoder, "forward", lambda: {"out": encoder.read(out)})}


if __name__ == "__main__":
    Ours().main()
