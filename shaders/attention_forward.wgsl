// out[b,i,h] = sum over j of p[i,j] v[b,j,h'], p[i,j] = exp(scale q[b,i,h] . k[b,j,h'] - lse[b,h,i]), lse = log of the sum over j of
// exp(scale q . k), over the keys j <= i of i's document; h' = h / (n_heads / n_kv_heads). p is made in tiles, and rescaled whenever
// a row meets a larger product; the running maximum is of scale log2(e) q . k.
$$ set kv, d_kv, lines = ("cache", d_cache, capacity) if "cache" in bound else ("qkv", d_qkv, seqlen)
$$ if "cache" in bound
var<private> last_key: u32;  // beyond it the cache may hold anything
$$ endif
$$ set k_start = 0 if "cache" in bound else n_heads * head_dim
$$ set loads = [("qkv", d_qkv, "seqlen - 1u")] + ([("cache", d_cache, "last_key")] if "cache" in bound else []) + ([("out", d_out, "seqlen - 1u")] if lanes else [])
$$ set stores = [("out", d_out, "seqlen - 1u")]
{$ include "include/attention.wgsl" $}
{$ include "include/documents.wgsl" $}
$$ import "include/attention_" ~ ("direct" if lanes else "staged") ~ ".wgsl" as tile with context
{{ tile.memory() }}
{{ tile.line_memory() }}
$$ set o = {"name": "o", "to": "out", "base": "out_base", "line": "m0"}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let h = wid.x;
    let b = wid.y;
    let m0 = ({{ ceil_div(seqlen, tile_m) - 1 }}u - wid.z) * {{ tile_m }}u;  // the longest work first
{{ tile.place() }}
    let q_base = b * {{ seqlen * d_qkv }}u + h * {{ head_dim }}u;
    let k_base = b * {{ lines * d_kv }}u + {{ k_start }}u + h / {{ n_heads // n_kv_heads }}u * {{ head_dim }}u;
    let v_base = k_base + {{ n_kv_heads * head_dim }}u;
    let out_base = b * {{ seqlen * d_out }}u + h * {{ head_dim }}u;
    let first_row = cached_keys(b) + m0;
    let last = min(m0 + {{ tile_m }}u, seqlen) - 1u;
    let from_key = first_key(b, m0);
    let to_key = cached_keys(b) + last + 1u;
$$ if "cache" in bound
    last_key = min(to_key, capacity) - 1u;
$$ endif
$$ if "documents" in bound
    let split = first_key(b, last);  // a tile of rows may see several documents
$$ endif
$$ for i in range(thread_m)
    let row{{ i }} = first_row + tm + {{ i * threads_m }}u;
$$ if "documents" in bound
    var from{{ i }} = from_key;
    if (split != from_key) { from{{ i }} = first_key(b, min(m0 + tm + {{ i * threads_m }}u, seqlen - 1u)); }
$$ endif
    var top{{ i }} = -3.0e38;
    var sum{{ i }} = 0.0;
$$ endfor
{{ tile.sums(o) }}
    for (var n0 = from_key; n0 < to_key; n0 += {{ tile_n }}u) {
{{ tile.nt("p", ("qkv", "q_base", "m0"), (kv, "k_base", "n0")) }}
$$ for i in range(thread_m)
$$ for g in range(groups_n)
        p{{ i }}_{{ g }} *= {{ (scale * 1.4426950408889634) | f32 }};
$$ endfor
$$ endfor
$$ set first, unseen = "first_row", "vec4f(-3.0e38)"
{$ include "include/attention_mask.wgsl" $}
$$ for i in range(thread_m)
        var most{{ i }} = p{{ i }}_0.x;
$$ for g in range(groups_n)
        most{{ i }} = max(max(most{{ i }}, max(p{{ i }}_{{ g }}.x, p{{ i }}_{{ g }}.y)), max(p{{ i }}_{{ g }}.z, p{{ i }}_{{ g }}.w));
$$ endfor
$$ endfor
{{ tile.over_line("most", "max({}, {})") }}
        // A row that saw only masked keys so far has ones here, in place of zeros; the first key it sees makes its keep 0.
$$ for i in range(thread_m)
        let new_top{{ i }} = max(top{{ i }}, most{{ i }});
        let keep{{ i }} = exp2(top{{ i }} - new_top{{ i }});
        top{{ i }} = new_top{{ i }};
        var added{{ i }} = vec4f();
$$ for g in range(groups_n)
        p{{ i }}_{{ g }} = exp2(p{{ i }}_{{ g }} - top{{ i }});
        added{{ i }} += p{{ i }}_{{ g }};
$$ endfor
        sum{{ i }} = sum{{ i }} * keep{{ i }} + (added{{ i }}.x + added{{ i }}.y) + (added{{ i }}.z + added{{ i }}.w);
$$ endfor
{{ tile.nn(o, "p", (kv, "v_base", "n0"), fresh="n0 == from_key", keep="keep") }}
    }
{{ tile.over_line("sum", "{} + {}") }}
$$ for i in range(thread_m)
    let inverse{{ i }} = 1.0 / sum{{ i }};
$$ endfor
{{ tile.finish(o, "inverse") }}
$$ if "lse" in bound
    if (tn == 0u) {
$$ for i in range(thread_m)
        if (m0 + tm + {{ i * threads_m }}u < seqlen) {
            lse[(b * {{ n_heads }}u + h) * seqlen + m0 + tm + {{ i * threads_m }}u] = top{{ i }} * 0.6931471805599453 + log(sum{{ i }});
        }
$$ endfor
    }
$$ endif
}
