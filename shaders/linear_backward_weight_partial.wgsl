// weight_partials[p, o * d_in + i] = sum over the rows of part p of dout[r, dout_start + o] * x[r, x_start + i]; bias_partials[p, o] likewise of dout
$$ set lines_m, lines_n, depth, more, row_sums = d_out, d_in, rows, none, "bias_partials" in bound
$$ set a = {"name": "dout", "stride": dout_stride, "start": dout_start, "along": "lines"}
$$ set b = {"name": "x", "stride": x_stride, "start": x_start, "along": "lines"}
$$ set out_type, width = ("vec4f", 4) if "weight_partials" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}

fn finish(part: u32, o: u32, i: u32, sum: {{ out_type }}) {
    if (o >= {{ d_out }}u || i >= {{ d_in }}u) { return; }
    weight_partials[(part * weight_stride + o * {{ d_in }}u + i) / {{ width }}u] = sum;
}
$$ if row_sums
fn finish_row_sum(part: u32, o: u32, sum: f32) {
    if (o >= {{ d_out }}u) { return; }
    bias_partials[part * bias_stride + o] = sum;
}
$$ endif
