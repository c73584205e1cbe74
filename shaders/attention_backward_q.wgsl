// dq[b,i,h] = scale * sum over j of ds[i,j] k[b,j,h'], the first columns of dqkv; ds = p (dout[b,i,h] . v[b,j,h'] - delta[b,h,i]),
// p = exp(scale q[b,i,h] . k[b,j,h'] - lse[b,h,i]), over the keys j <= i of i's document
$$ set loads = [("qkv", d_qkv, "seqlen - 1u"), ("dout", d_out, "seqlen - 1u")] + ([("dqkv", d_qkv, "seqlen - 1u")] if lanes else [])
$$ set stores = [("dqkv", d_qkv, "seqlen - 1u")]
{$ include "include/attention.wgsl" $}
{$ include "include/documents.wgsl" $}
$$ import "include/attention_" ~ ("direct" if lanes else "staged") ~ ".wgsl" as tile with context
{{ tile.memory() }}
$$ set dq = {"name": "dq", "to": "dqkv", "base": "q_base", "line": "m0"}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let h = wid.x;
    let b = wid.y;
    let m0 = ({{ ceil_div(seqlen, tile_m) - 1 }}u - wid.z) * {{ tile_m }}u;  // the longest work first
{{ tile.place() }}
    let q_base = b * {{ seqlen * d_qkv }}u + h * {{ head_dim }}u;
    let k_base = b * {{ seqlen * d_qkv }}u + ({{ n_heads }}u + h / {{ n_heads // n_kv_heads }}u) * {{ head_dim }}u;
    let v_base = k_base + {{ n_kv_heads * head_dim }}u;
    let out_base = b * {{ seqlen * d_out }}u + h * {{ head_dim }}u;
    let last = min(m0 + {{ tile_m }}u, seqlen) - 1u;
    let from_key = first_key(b, m0);
$$ if "documents" in bound
    let split = first_key(b, last);  // a tile of rows may see several documents
$$ endif
$$ for i in range(thread_m)
    let row{{ i }} = m0 + tm + {{ i * threads_m }}u;
    let lse{{ i }} = lse[(b * n_heads + h) * seqlen + min(row{{ i }}, seqlen - 1u)] * 1.4426950408889634;
    let delta{{ i }} = delta[(b * n_heads + h) * seqlen + min(row{{ i }}, seqlen - 1u)];
$$ if "documents" in bound
    var from{{ i }} = from_key;
    if (split != from_key) { from{{ i }} = first_key(b, min(row{{ i }}, seqlen - 1u)); }
$$ endif
$$ endfor
{{ tile.sums(dq) }}
    for (var n0 = from_key; n0 <= last; n0 += {{ tile_n }}u) {
{{ tile.nt("p", ("qkv", "q_base", "m0"), ("qkv", "k_base", "n0")) }}
{{ tile.nt("dp", ("dout", "out_base", "m0"), ("qkv", "v_base", "n0")) }}
$$ for i in range(thread_m)
$$ for g in range(groups_n)
        p{{ i }}_{{ g }} = exp2(p{{ i }}_{{ g }} * {{ (scale * 1.4426950408889634) | f32 }} - lse{{ i }});
$$ endfor
$$ endfor
$$ set first, unseen = "m0", "vec4f()"
{$ include "include/attention_mask.wgsl" $}
$$ for i in range(thread_m)
$$ for g in range(groups_n)
        p{{ i }}_{{ g }} *= {{ scale | f32 }} * (dp{{ i }}_{{ g }} - delta{{ i }});
$$ endfor
$$ endfor
{{ tile.nn(dq, "p", ("qkv", "k_base", "n0"), fresh="n0 == from_key") }}
    }
{{ tile.finish(dq) }}
}
