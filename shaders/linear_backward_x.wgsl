// dx[r, dx_start + i] += scale * sum over o of dout[r, dout_start + o] * weight[o, i]
$$ set lines_m, lines_n, depth, from_k, to_k, row_sums = rows, d_in, d_out, "0u", d_out ~ "u", false
$$ set a = {"name": "dout", "stride": dout_stride, "start": dout_start, "along": "k"}
$$ set b = {"name": "weight", "stride": d_in, "start": 0, "along": "lines"}
$$ set scaled = "sum" if scale == 1.0 else "sum * " ~ (scale | f32)
$$ set out_type, width = ("vec4f", 4) if "dx" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}

fn finish(r: u32, i: u32, sum: {{ out_type }}) {
    if (r >= rows || i >= d_in) { return; }
    {{ add("dx", "(r * dx_stride + " ~ dx_start ~ "u + i) / " ~ width ~ "u", scaled) }}
}
