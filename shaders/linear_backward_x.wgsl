// dx[r, dx_start + i] += scale * product, product = sum over o of dout[r, dout_start + o] * weight[o, i],
// plus sum over k of dlow[r, k] * A[k, i]; a weight that is stored as i8 counts weight_scale[o] times
$$ set lines_m, lines_n, depth, row_sums = rows, d_in, d_out, false
$$ set a = {"name": "dout", "stride": dout_stride, "start": dout_start, "along": "k"}
$$ set b = {"name": "weight", "stride": d_in, "start": 0, "along": "lines", "dtype": weight_dtype}
$$ set more = {"depth": rank, "a": {"name": "dlow", "stride": rank, "start": 0, "along": "k"}, "b": {"name": "A", "stride": d_in, "start": 0, "along": "lines"}} if "dlow" in bound else none
$$ set scaled = "sum" if scale == 1.0 else "sum * " ~ (scale | f32)
$$ set out_type, width = ("vec4f", 4) if "dx" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}

fn {{ joined | default("") }}finish(r: u32, i: u32, sum: {{ out_type }}) {
    if (r >= rows || i >= d_in) { return; }
    {{ add("dx", "(r * dx_stride + " ~ dx_start ~ "u + i) / " ~ width ~ "u", scaled) }}
}
