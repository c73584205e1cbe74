// out[r, out_start + o] = act(scale * product + bias[o]) + residual[r, o], product = sum over i of x[r, x_start + i] * weight[o, i],
// plus sum over k of low[r, k] * B[o, k]; a weight that is stored as i8 counts weight_scale[o] times
$$ set lines_m, lines_n, depth, row_sums = rows, d_out, d_in, false
$$ set a = {"name": "x", "stride": x_stride, "start": x_start, "along": "k"}
$$ set b = {"name": "weight", "stride": d_in, "start": 0, "along": "k", "dtype": weight_dtype}
$$ set more = {"depth": rank, "a": {"name": "low", "stride": rank, "start": 0, "along": "k"}, "b": {"name": "B", "stride": rank, "start": 0, "along": "k"}} if "low" in bound else none
$$ set out_type, width = ("vec4f", 4) if "out" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}
$$ if activation == "softplus"
{$ include "include/softplus.wgsl" $}
$$ endif

fn finish(r: u32, o: u32, sum: {{ out_type }}) {
    if (r >= rows || o >= d_out) { return; }
    var value = sum;
$$ if scale != 1.0
    value *= {{ scale | f32 }};
$$ endif
$$ if "bias" in bound
    value += bias[o / {{ width }}u];
$$ endif
$$ if activation == "softplus" and width == 4
    value = vec4f(softplus(value.x), softplus(value.y), softplus(value.z), softplus(value.w));
$$ elif activation == "softplus"
    value = softplus(value);
$$ endif
$$ if "residual" in bound
    value += residual[(r * d_out + o) / {{ width }}u];
$$ endif
    {{ store("out", "(r * out_stride + " ~ out_start ~ "u + o) / " ~ width ~ "u", "value") }}
}
