"""Planning: shapes, order, lifetimes, limits. Needs no GPU."""

import itertools
from dataclasses import replace

import pytest

from wgsl_train.config import MambaConfig
from wgsl_train.errors import DeviceError, ShapeError, TemplateError
from wgsl_train.kernel import KERNELS, PORTABLE, Kernel, Target, Templates, Tensor
from wgsl_train.model import plan_step
from wgsl_train.models import language_model
from wgsl_train.plan import BLOCK, Layout, Memory, ParamSpec, Plan

MIB = 1 << 20
BIG = Target(kind="discrete", max_binding=2 << 30, max_buffer=4 << 30)


def make(name, reads=(), writes=(), adds=()):
    """A kernel for planning alone: it never renders, and does not stay registered."""
    kernel = Kernel(
        name,
        reads=dict.fromkeys(reads, "*n"),
        writes=dict.fromkeys(writes, "*n"),
        adds=dict.fromkeys(adds, "*n"),
        grid=lambda v: (1, 1, 1),
    )
    del KERNELS[name]
    return kernel


COPY = make("test_copy", reads=["x"], writes=["out"])
ADD = make("test_add", reads=["x"], adds=["out"])


def empty_plan(target=PORTABLE):
    return Plan(Layout([], target), target)


def test_shapes_are_solved_and_a_mismatch_names_kernel_binding_and_shapes():
    forward = KERNELS["linear_forward"]
    dims = forward.match({"x": (2, 3, 8), "weight": (5, 8), "out": (2, 3, 5)})
    assert (dims["rows"], dims["d_out"], dims["d_in"]) == (6, 5, 8)
    with pytest.raises(ShapeError, match=r"linear_forward: out is declared \(\*rows out_stride\)"):
        forward.match({"x": (2, 3, 8), "weight": (5, 8), "out": (2, 4, 5)})
    with pytest.raises(ShapeError, match="linear_forward binds"):
        forward.match({"x": (2, 3, 8), "weight": (5, 8)})


def test_an_empty_tensor_is_refused():
    with pytest.raises(ShapeError, match="n is 0"):
        COPY.match({"x": (0,), "out": (0,)})


def test_activations_share_memory_only_when_their_lifetimes_are_disjoint():
    plan = empty_plan()
    given = plan.persistent("given", (1000,))
    chain = [given] + [plan.tensor(f"t{i}", (1000,)) for i in range(4)]
    for x, out in itertools.pairwise(chain):
        plan.dispatch(COPY, x=x, out=out)
    memory = plan.memory()
    assert memory.place[chain[1]] == memory.place[chain[3]]
    assert memory.place[chain[2]] == memory.place[chain[4]]
    assert memory.place[chain[1]] != memory.place[chain[2]]
    assert memory.total == 3 * 4096
    assert memory.by_kind()["activations"] == 2 * 4096
    assert len(plan.memory(share=False).buffers) == 5


def test_the_first_contribution_to_an_activations_gradient_overwrites_and_later_ones_add():
    plan = empty_plan()
    x = plan.persistent("x", (64,))
    dx = plan.tensor("dx", (64,))
    plan.dispatch(ADD, x=x, out=dx)
    plan.dispatch(ADD, x=x, out=dx)
    first, second = plan.dispatches
    assert (first.accumulate, second.accumulate) == (frozenset(), frozenset({"out"}))


def test_reading_what_nothing_wrote_is_refused():
    plan = empty_plan()
    with pytest.raises(ShapeError, match="nothing has written"):
        plan.dispatch(COPY, x=plan.tensor("a", (4,)), out=plan.tensor("b", (4,)))


def test_reading_and_writing_one_buffer_is_refused():
    plan = empty_plan()
    arena = plan.persistent("arena", (256,))
    with pytest.raises(ShapeError, match="reads and writes arena"):
        plan.dispatch(COPY, x=arena.view(0, (64,)), out=arena.view(64, (64,)))


def test_views_start_at_multiples_of_256_bytes():
    t = Tensor("t", (1000,))
    assert t.view(64, (10,)).start == 64
    with pytest.raises(ShapeError, match="multiple of 64"):
        t.view(65, (10,))


def test_a_tensor_of_more_elements_than_an_index_holds_is_refused():
    with pytest.raises(ShapeError, match="2,214,592,512 elements"):
        empty_plan(BIG).tensor("huge", (64, 4096, 33, 256))
    with pytest.raises(ShapeError, match="2,214,592,512 elements"):
        Layout([ParamSpec("huge", (64 * 4096, 33 * 256))], BIG)


def test_the_usable_binding_trusts_no_single_limit():
    target = Target(max_buffer=2147483647, max_binding=2147483648)
    assert target.usable_binding == 2147483392


def test_a_binding_beyond_the_limit_is_refused_with_a_remedy():
    plan = empty_plan()
    n = 128 * MIB // 4 + 1
    with pytest.raises(DeviceError, match="smaller batch"):
        plan.dispatch(COPY, x=plan.persistent("x", (n,)), out=plan.persistent("y", (n,)))


def test_parameters_lie_at_blocks_and_spread_over_pages():
    specs = [ParamSpec(f"p{i}", (n,)) for i, n in enumerate([1, 63, 64, 65, 100, 1025])]
    layout = Layout(specs)
    assert [layout.param(s.name).start for s in specs] == [BLOCK * i for i in range(6)]
    tiny = replace(PORTABLE, max_buffer=8192)
    pages = Layout(specs, tiny).pages
    assert [p.params.size for p in pages] == [2048, 2048, 1024, 2048]
    assert all(p.params.nbytes <= 8192 for p in pages)


def test_a_table_beyond_one_binding_is_split_by_rows():
    layout = Layout([ParamSpec("E", (50280, 768))])
    pieces = layout.pieces["E"]
    assert len(pieces) == 2
    assert sum(t.shape[0] for _, t in pieces) == 50280
    assert all(t.nbytes <= 128 * MIB for _, t in pieces)
    assert pieces[1][0] == pieces[0][1].shape[0]
    with pytest.raises(ShapeError, match="does not fit one storage binding"):
        layout.param("E")


def test_decay_is_chosen_by_name_per_block():
    layout = Layout([ParamSpec("a", (1025,)), ParamSpec("b", (3,))])
    layout.set_decay(lambda name: name == "a")
    assert layout.pages[0].decay == [1, 1, 0]


def test_a_frozen_parameter_has_no_gradient():
    layout = Layout([ParamSpec("a", (4,), trainable=False), ParamSpec("b", (4,))])
    assert layout.grad(layout.param("a")) is None
    assert layout.grad(layout.param("b")) is not None
    assert (layout.n_params, layout.n_trainable) == (8, 4)


def test_a_model_of_1_4_billion_parameters_is_planned_and_refused_by_its_bytes():
    config = MambaConfig(vocab_size=50280, d_model=2048, n_layer=48)
    layout = Layout(language_model.parameters(config), BIG)
    assert 1.36e9 < layout.n_params < 1.38e9
    plan = plan_step(config, layout, BIG, 1, 256, update=True).plan
    memory = plan.memory()
    assert all(n <= 2 << 30 for n in memory.buffers.values())
    assert memory.by_kind()["moments"] == 2 * memory.by_kind()["parameters"]
    memory.require(memory.total)
    with pytest.raises(DeviceError, match=r"1,000 bytes are missing"):
        memory.require(memory.total - 1000)


def test_dispatches_stay_few():
    config = MambaConfig(vocab_size=256, d_model=128, n_layer=4)
    for target in (PORTABLE, BIG, replace(PORTABLE, kind="cpu")):
        layout = Layout(language_model.parameters(config), target)
        plan = plan_step(config, layout, target, 8, 256, update=True).plan
        assert len(plan.dispatches) <= 25 * config.n_layer + 20, str(plan)


def test_states_saved_for_backward_stay_below_a_sixteenth():
    """No B*L*D*N term: at batch 2, seqlen 1024, d_inner 512, d_state 16."""
    config = MambaConfig(vocab_size=64, d_model=256, n_layer=1)
    plan = plan_step(config, Layout(language_model.parameters(config)), PORTABLE, 2, 1024).plan
    written = {t.root for d in plan.sections["forward"] for _, t in d.bound("writes")}
    read = {t.root for d in plan.sections["backward"] for _, t in d.bound("reads")}
    saved = [t for t in written & read if "chunk_states" in t.name]
    assert saved
    assert sum(t.nbytes for t in saved) <= 4 * 2 * 1024 * 512 * 16 // 16
    assert max(t.size for t in written | read) < 2 * 1024 * 512 * 16


def test_activation_checkpointing_plans_less_memory():
    config = MambaConfig(vocab_size=64, d_model=64, n_layer=8)
    layout = Layout(language_model.parameters(config))
    whole, replayed = (
        plan_step(config, layout, PORTABLE, 1, 2048, activation_checkpointing=on).plan.memory()
        for on in (False, True)
    )
    assert replayed.by_kind()["activations"] <= 0.4 * whole.by_kind()["activations"]


def test_a_plan_prints_one_line_a_dispatch():
    config = MambaConfig(vocab_size=64, d_model=16, n_layer=1)
    plan = plan_step(
        config, Layout(language_model.parameters(config)), PORTABLE, 1, 8, update=True
    ).plan
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.dispatches) + 3
    assert "linear_forward" in str(plan)


@pytest.fixture
def render(tmp_path, monkeypatch):
    """Renders a template of a folder of its own."""

    def rendered(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.wgsl").write_text(text)
        monkeypatch.setattr("wgsl_train.kernel.TEMPLATES", Templates(tmp_path))
        kernel = make(next(iter(texts)), reads=["x"], writes=["out"])
        return kernel.render({"n": 4}, {"n": 4}, ["x", "out"], [])

    return rendered


@pytest.mark.parametrize(
    "line, place, reason",
    [
        ("  let a = {{ nothing }};", "3:14", "'nothing' is undefined"),
        ("  let a = {{ n + }};", "3:11", "unexpected"),
        ("  let a = 1; {$ fi n $}", "3:17", "unknown tag 'fi'"),
        ("  $$ for i in", "3:3", "Expected an expression"),
        ("  let a = {{ n // 0 }};", "3:11", "ZeroDivisionError"),
        ("  let a = {{ 'b' + n }};", "3:11", "TypeError"),
        ("{$ include 'gone.wgsl' $}", "3:1", "no template shaders/gone.wgsl"),
        ("@group(0) @binding(7) var<storage> y: array<f32>;", "3:1", "declares a binding"),
    ],
)
def test_a_template_error_names_file_line_and_column(render, line, place, reason):
    with pytest.raises(TemplateError) as raised:
        render(test_broken=f"// out = x\nfn f() {{\n{line}\n}}\n")
    assert str(raised.value).startswith(f"shaders/test_broken.wgsl:{place}: "), raised.value
    assert reason in str(raised.value)


def test_a_template_error_in_an_include_names_the_include(render):
    with pytest.raises(TemplateError, match=r"^shaders/test_inner.wgsl:2:4: 'gone' is undefined"):
        render(
            test_outer="// out = x\n{$ include 'test_inner.wgsl' $}\n", test_inner="\n{{ gone }}\n"
        )


def test_rendered_text_knows_its_place_through_loops_macros_and_includes(render):
    rendered = render(
        test_lines="// out = x\n"
        "$$ for i in range(2)\n"
        "let a{{ i }} = 1{$ for j in range(2) $} + b{{ j }}{$ endfor $};\n"
        "$$ endfor\n"
        "{$ macro twice(a) $}2.0 * {{ a }}{$ endmacro $}\n"
        "  let c = {{ twice('d') }} + e;\n"
        "{$ include 'inc.wgsl' $}\n",
        inc="// included\nlet b = 2;\n",
    )
    lines = rendered.source.splitlines()
    assert len(lines) == len(rendered.origins)
    assert "/*@" not in rendered.source

    def place(line, text):
        return rendered.place(1 + lines.index(line), 1 + line.index(text))

    sums = "let a1 = 1 + b0 + b1;"
    assert place(sums, "let") == "shaders/test_lines.wgsl:3:1"
    assert place(sums, "1 = 1") == "shaders/test_lines.wgsl:3:6"
    assert place(sums, "= 1") == "shaders/test_lines.wgsl:3:14"
    assert place(sums, "b1") == "shaders/test_lines.wgsl:3:43"
    assert place("  let c = 2.0 * d + e;", "2.0") == "shaders/test_lines.wgsl:5:21"
    assert place("  let c = 2.0 * d + e;", "e;") == "shaders/test_lines.wgsl:6:30"
    assert place("let b = 2;", "2") == "shaders/inc.wgsl:2:9"
    assert rendered.place(2) == "test_lines (generated):2:1"


def test_memory_of_nothing_is_nothing():
    assert Memory([]).total == 0
