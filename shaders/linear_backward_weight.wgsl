// dweight[o, i] += sum over r of dout[r, dout_start + o] * x[r, x_start + i]; dbias[o] += sum over r of dout[r, dout_start + o]
$$ set lines_m, lines_n, depth, more, row_sums = d_out, d_in, rows, none, "dbias" in bound
$$ set a = {"name": "dout", "stride": dout_stride, "start": dout_start, "along": "lines"}
$$ set b = {"name": "x", "stride": x_stride, "start": x_start, "along": "lines"}
$$ set out_type, width = ("vec4f", 4) if "dweight" in vec4 else ("f32", 1)
{$ include "include/matmul.wgsl" $}

fn {{ joined | default("") }}finish(o: u32, i: u32, sum: {{ out_type }}) {
    if (o >= d_out || i >= d_in) { return; }
    {{ add("dweight", "(o * d_in + i) / " ~ width ~ "u", "sum") }}
}
$$ if row_sums
fn {{ joined | default("") }}finish_row_sum(o: u32, sum: f32) {
    if (o >= d_out) { return; }
    {{ add("dbias", "o", "sum") }}
}
$$ endif
