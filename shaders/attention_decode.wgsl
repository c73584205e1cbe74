// out[b,t,h] = sum over keys j of softmax(scale q[b,t,h] . k[b,j,h']) v[b,j,h'], keys and values from the cache; for few timesteps.
// A workgroup owns one (b, t, h). {{ lanes }} threads, a slice, find the products of as many keys, then sum {{ 4 * per_lane }} columns each over them.
$$ set depth = 4
$$ set loads = [("qkv", d_qkv, "seqlen - 1u"), ("cache", d_cache, "last_key")]
$$ set stores = [("out", d_out, "seqlen - 1u")]
{$ include "include/attention.wgsl" $}
{$ include "include/documents.wgsl" $}
$$ set slices = workgroup // lanes
var<private> last_key: u32;  // beyond it the cache may hold anything
var<workgroup> products: array<f32, {{ workgroup }}>;
var<workgroup> values: array<vec4f, {{ workgroup }}>;
var<workgroup> tops: array<f32, {{ slices }}>;
var<workgroup> sums: array<f32, {{ slices }}>;

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let h = wid.x;
    let t = wid.y;
    let b = wid.z;
    let slice = lane / {{ lanes }}u;
    let own = lane % {{ lanes }}u;
    let q_base = b * {{ seqlen * d_qkv }}u + h * {{ head_dim }}u;
    let k_base = b * {{ capacity * d_cache }}u + h / {{ n_heads // n_kv_heads }}u * {{ head_dim }}u;
    let v_base = k_base + {{ n_kv_heads * head_dim }}u;
    let to_key = cached_keys(b) + t + 1u;
    last_key = min(to_key, capacity) - 1u;
    var top = -3.0e38;
    var sum = 0.0;
$$ for p in range(per_lane)
    var value{{ p }} = vec4f();
$$ endfor
    for (var n0 = first_key(b, t); n0 < to_key; n0 += {{ workgroup }}u) {
        var product = vec4f();
        for (var e = 0u; e < {{ head_dim }}u; e += 4u) {
            product += load_qkv(q_base, t, e) * load_cache(k_base, n0 + lane, e);
        }
        let scaled = {{ (scale * 1.4426950408889634) | f32 }} * ((product.x + product.y) + (product.z + product.w));
        products[lane] = select(-3.0e38, scaled, n0 + lane < to_key);
        workgroupBarrier();
        var new_top = top;
        for (var j = 0u; j < {{ lanes }}u; j++) { new_top = max(new_top, products[slice * {{ lanes }}u + j]); }
        let keep = exp2(top - new_top);
        top = new_top;
        sum *= keep;
$$ for p in range(per_lane)
        value{{ p }} *= keep;
$$ endfor
        // Several at a time, so that their loads overlap.
        for (var j = 0u; j < {{ lanes }}u; j += {{ unroll }}u) {
            let key = n0 + slice * {{ lanes }}u + j;
$$ for u in range(unroll)
$$ for p in range(per_lane)
            let v{{ u }}_{{ p }} = load_cache(v_base, key + {{ u }}u, (own + {{ p * lanes }}u) * 4u);
$$ endfor
$$ endfor
$$ for u in range(unroll)
            let weight{{ u }} = exp2(products[slice * {{ lanes }}u + j + {{ u }}u] - top);
            sum += weight{{ u }};
$$ for p in range(per_lane)
            value{{ p }} += weight{{ u }} * v{{ u }}_{{ p }};
$$ endfor
$$ endfor
        }
        workgroupBarrier();  // before others' products are overwritten
    }
    // A slice that met no key has top -3e38, and so no weight.
    if (own == 0u) {
        tops[slice] = top;
        sums[slice] = sum;
    }
    workgroupBarrier();
    var all_top = tops[0];
    for (var s = 1u; s < {{ slices }}u; s++) { all_top = max(all_top, tops[s]); }
    var all_sum = 0.0;
    for (var s = 0u; s < {{ slices }}u; s++) { all_sum += sums[s] * exp2(tops[s] - all_top); }
$$ for p in range(per_lane)
    values[lane] = value{{ p }};
    workgroupBarrier();
    if (slice == 0u) {
        var all = vec4f();
        for (var s = 0u; s < {{ slices }}u; s++) { all += values[s * {{ lanes }}u + own] * exp2(tops[s] - all_top); }
        store_out(b * {{ seqlen * d_out }}u + h * {{ head_dim }}u, t, (own + {{ p * lanes }}u) * 4u, all / all_sum);
    }
$$ if p < per_lane - 1
    workgroupBarrier();
$$ endif
$$ endfor
}
