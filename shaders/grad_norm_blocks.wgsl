// block_sums[b] = (sum of (g 2^-80)^2 over |g| > 2^40, of g^2 over those between, of (g 2^80)^2 over |g| < 2^-40, 1 if any is not finite)
// for the elements g of grads[1024 b ...]. Three sums, so that no square leaves the range of f32: J. L. Blue (1978).
$$ set value_type = "vec4f"
$$ set blocks = n // 1024
$$ set count = 256 // lanes
$$ set packed = true
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
fn combine(a: vec4f, b: vec4f) -> vec4f {
    return vec4f(a.xyz + b.xyz, max(a.w, b.w));
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own_block = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let block = min(own_block, {{ blocks - 1 }}u);  // lanes past the end repeat the last, and store nothing
    var large = vec4f(0.0);
    var middle = vec4f(0.0);
    var small = vec4f(0.0);
    var strange = vec4<bool>(false);
    for (var i = 0u; i < {{ count }}u; i++) {
        let raw = grads[block * 256u + i * {{ lanes }}u + lane % {{ lanes }}u];
        // By the exponent's bits: compilers may assume that comparisons meet no NaN.
        let not_finite = ((bitcast<vec4u>(raw) >> vec4u(23u)) & vec4u(255u)) == vec4u(255u);
        strange = strange | not_finite;
        let g = select(raw, vec4f(0.0), not_finite);
        let is_large = abs(g) > vec4f(0x1p40);
        let is_small = abs(g) < vec4f(0x1p-40);
        let square = g * select(select(vec4f(1.0), vec4f(0x1p80), is_small), vec4f(0x1p-80), is_large);
        large += select(vec4f(0.0), square * square, is_large);
        small += select(vec4f(0.0), square * square, is_small);
        middle += select(square * square, vec4f(0.0), is_large | is_small);
    }
    let own = vec4f(fold(large), fold(middle), fold(small), select(0.0, 1.0, any(strange)));
    let total = lane_reduce(own, lane);
    if (own_block < {{ blocks }}u && lane % {{ lanes }}u == 0u) {
        block_sums[{{ first_block }}u + own_block] = total;
    }
}
