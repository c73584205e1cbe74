// dx_partials[p, r * d_in + i] = scale * sum over the o of part p of dout[r, dout_start + o] * weight[o, i]
$$ set span = ceil_div(ceil_div(d_out, parts), 32) * 32
$$ set lines_m, lines_n, depth, row_sums = rows, d_in, d_out, false
$$ set from_k, to_k = "wid.z * " ~ span ~ "u", "min(" ~ d_out ~ "u, (wid.z + 1u) * " ~ span ~ "u)"
$$ set a = {"name": "dout", "stride": dout_stride, "start": dout_start, "along": "k"}
$$ set b = {"name": "weight", "stride": d_in, "start": 0, "along": "lines"}
$$ set scaled = "sum" if scale == 1.0 else "sum * " ~ (scale | f32)
$$ set out_type, width = ("vec4f", 4) if "dx_partials" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}

fn finish(part: u32, r: u32, i: u32, sum: {{ out_type }}) {
    if (r >= rows || i >= d_in) { return; }
    dx_partials[(part * part_stride + r * d_in + i) / {{ width }}u] = {{ scaled }};
}
