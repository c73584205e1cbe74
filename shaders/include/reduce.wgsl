// Workgroup tree reductions; every lane gets the result. Needs a power-of-two workgroup.
var<workgroup> partial: array<f32, {{ workgroup }}>;
$$ for name, combine in [("sum", "a + b"), ("max", "max(a, b)")]
fn reduce_{{ name }}(value: f32, lane: u32) -> f32 {
    partial[lane] = value;
    workgroupBarrier();
    for (var stride = {{ workgroup // 2 }}u; stride > 0u; stride /= 2u) {
        if (lane < stride) { let a = partial[lane]; let b = partial[lane + stride]; partial[lane] = {{ combine }}; }
        workgroupBarrier();
    }
    let result = partial[0];
    workgroupBarrier();
    return result;
}
$$ endfor
