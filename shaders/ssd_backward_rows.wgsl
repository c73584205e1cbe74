// dxBC's first columns, given du there without its skip: dx = delta du + skip dy. sums = [dy y - delta x du, the derivative by cum |
// x (du + scores[t, t] dy), that by delta but for cum | x dy], each summed over the head's channels; y and du without their skips
$$ set strict = false
$$ set packed = "y" in vec4
$$ set columns = head_dim // (4 if packed else 1)
{$ include "include/pack.wgsl" $}
{$ include "include/ssd.wgsl" $}
{$ include "include/group_index.wgsl" $}
$$ set value_type = "vec3f"
fn combine(a: vec3f, b: vec3f) -> vec3f {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let valid = own < {{ batch * chunks * chunk * n_heads }}u;
    let at = min(own, {{ batch * chunks * chunk * n_heads - 1 }}u);
    own_head = at % n_heads;
    own_group = own_head / {{ n_heads // n_groups }}u;
    let t = at / n_heads % chunk;
    own_chunk = at / (n_heads * chunk) % chunks;
    own_sequence = at / (n_heads * chunk * chunks);
    own_dt = dt_index(own_head);
    let row = row_of(t);
    let delta = delta_at(own_dt, t);
    let skipped = skip[row * n_heads + own_head];
    var terms = vec3f();
    if (valid && inside(t)) {
        for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
            let i = (row * n_heads + own_head) * {{ columns }}u + c;
            let j = row * {{ d_xBC // (4 if packed else 1) }}u + own_head * {{ columns }}u + c;
            let x = xBC[j];
            let d = dy[i];
            let du = dxBC[j];
            dxBC[j] = delta * du + skipped * d;
            terms += vec3f(fold(d * y[i]), fold(x * du), fold(x * d));
        }
    }
    terms = lane_reduce(terms, lane);
    if (valid && lane % {{ lanes }}u == 0u) {
        let score = scores[(((own_sequence * chunks + own_chunk) * n_groups + own_group) * chunk + t) * chunk + t];
        let to = ((own_sequence * chunks + own_chunk) * n_heads + own_head) * {{ 3 * chunk }}u + t;
        sums[to] = terms.x - delta * terms.y;
        sums[to + chunk] = terms.y + score * terms.z;
        sums[to + 2u * chunk] = terms.z;
    }
}
