// dv[b,j,h'] = sum over i, h of p[i,j] dout[b,i,h], dk[b,j,h'] = scale * sum over i, h of ds[i,j] q[b,i,h]: the last columns of dqkv;
// ds = p (dout[b,i,h] . v[b,j,h'] - delta[b,h,i]), p = exp(scale q[b,i,h] . k[b,j,h'] - lse[b,h,i]), over the queries i >= j of j's
// document and the heads h of the group of h', which is h / (n_heads / n_kv_heads). Here keys are lines, and queries columns.
$$ set group = n_heads // n_kv_heads
$$ set loads = [("qkv", d_qkv, "seqlen - 1u"), ("dout", d_out, "seqlen - 1u")] + ([("dqkv", d_qkv, "seqlen - 1u")] if lanes else [])
$$ set stores = [("dqkv", d_qkv, "seqlen - 1u")]
{$ include "include/attention.wgsl" $}
{$ include "include/documents.wgsl" $}
$$ import "include/attention_" ~ ("direct" if lanes else "staged") ~ ".wgsl" as tile with context
{{ tile.memory() }}
$$ set dk = {"name": "dk", "to": "dqkv", "base": "k_base", "line": "m0"}
$$ set dv = {"name": "dv", "to": "dqkv", "base": "v_base", "line": "m0"}

$$ for name in ["lse", "delta"]
// Those of four queries from i on.
fn load_{{ name }}(base: u32, i: u32) -> vec4f {
    return vec4f({$ for j in range(4) $}{{ name }}[base + min(i + {{ j }}u, seqlen - 1u)]{{ ", " if j < 3 }}{$ endfor $});
}
$$ endfor

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let b = wid.y;
    let m0 = wid.z * {{ tile_m }}u;
{{ tile.place() }}
    let k_base = b * {{ seqlen * d_qkv }}u + ({{ n_heads }}u + wid.x) * {{ head_dim }}u;
    let v_base = k_base + {{ n_kv_heads * head_dim }}u;
    let last = min(m0 + {{ tile_m }}u, seqlen) - 1u;
$$ if "documents" in bound
    let to_query = document_end(b, last);
$$ else
    let to_query = seqlen;
$$ endif
$$ for i in range(thread_m)
    let key{{ i }} = m0 + tm + {{ i * threads_m }}u;
$$ if "documents" in bound
    let document{{ i }} = documents[b * seqlen + min(key{{ i }}, seqlen - 1u)];
$$ endif
$$ endfor
{{ tile.sums(dk) }}
{{ tile.sums(dv) }}
    for (var h = wid.x * {{ group }}u; h < (wid.x + 1u) * {{ group }}u; h++) {
    let q_base = b * {{ seqlen * d_qkv }}u + h * {{ head_dim }}u;
    let out_base = b * {{ seqlen * d_out }}u + h * {{ head_dim }}u;
    let row_base = (b * n_heads + h) * seqlen;
    for (var n0 = m0; n0 < to_query; n0 += {{ tile_n }}u) {
{{ tile.nt("p", ("qkv", "k_base", "m0"), ("qkv", "q_base", "n0")) }}
$$ for g in range(groups_n)
        let query{{ g }} = n0 + (tn + {{ g * threads_n }}u) * 4u;
        let lse{{ g }} = load_lse(row_base, query{{ g }}) * 1.4426950408889634;
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(groups_n)
        p{{ i }}_{{ g }} = exp2(p{{ i }}_{{ g }} * {{ (scale * 1.4426950408889634) | f32 }} - lse{{ g }});
$$ endfor
$$ endfor
        if (n0 < last || n0 + {{ tile_n }}u > to_query{{ " || documents[b * seqlen + m0] != documents[b * seqlen + min(n0 + " ~ tile_n ~ "u, seqlen) - 1u]" if "documents" in bound }}) {
$$ for g in range(groups_n)
            let queries{{ g }} = vec4u(query{{ g }}) + vec4u(0u, 1u, 2u, 3u);
$$ if "documents" in bound
            let documents{{ g }} = vec4u({$ for j in range(4) $}documents[b * seqlen + min(query{{ g }} + {{ j }}u, seqlen - 1u)]{{ ", " if j < 3 }}{$ endfor $});
$$ endif
$$ for i in range(thread_m)
            p{{ i }}_{{ g }} = select(vec4f(), p{{ i }}_{{ g }}, (queries{{ g }} >= vec4u(key{{ i }})) & (queries{{ g }} < vec4u(to_query)){{ " & (documents" ~ g ~ " == vec4u(document" ~ i ~ "))" if "documents" in bound }});
$$ endfor
$$ endfor
        }
{{ tile.nn(dv, "p", ("dout", "out_base", "n0"), fresh="h == wid.x * " ~ group ~ "u && n0 == m0") }}
{{ tile.nt("dp", ("qkv", "v_base", "m0"), ("dout", "out_base", "n0")) }}
$$ for g in range(groups_n)
        let delta{{ g }} = load_delta(row_base, query{{ g }});
$$ for i in range(thread_m)
        p{{ i }}_{{ g }} *= {{ scale | f32 }} * (dp{{ i }}_{{ g }} - delta{{ g }});
$$ endfor
$$ endfor
{{ tile.nn(dk, "p", ("qkv", "q_base", "n0"), fresh="h == wid.x * " ~ group ~ "u && n0 == m0") }}
    }
    }
{{ tile.finish(dk) }}
{{ tile.finish(dv) }}
}
