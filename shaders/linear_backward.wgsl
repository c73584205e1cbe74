// dx[r, dx_start + i] += sum over o of dout[r, dout_start + o] * weight[o, i]; dbias[o] += sum over r of dout[r, dout_start + o];
// dweight[o, i] += sum over r of dout[r, dout_start + o] * x[r, x_start + i]: both products in one dispatch, for CPUs
$$ set joined, tile_m, tile_n, thread_m, thread_n = "x_", x_tile_m, x_tile_n, x_thread_m, x_thread_n
$$ set weight_dtype, scale = "f32", 1.0
{$ include "linear_backward_x.wgsl" $}
$$ set joined, tile_m, tile_n, thread_m, thread_n = "weight_", weight_tile_m, weight_tile_n, weight_thread_m, weight_thread_n
{$ include "linear_backward_weight.wgsl" $}
$$ set x_tiles = ceil_div(rows, x_tile_m) * ceil_div(d_in, x_tile_n)
$$ set tiles = x_tiles + ceil_div(d_out, weight_tile_m) * ceil_div(d_in, weight_tile_n)

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) thread: u32) {
    // The tiles of both are mixed evenly: each of the CPU's threads gets a run of workgroups.
    let before = wid.x * {{ x_tiles }}u / {{ tiles }}u;
    if ((wid.x + 1u) * {{ x_tiles }}u / {{ tiles }}u > before) {
        x_product(before, thread);
    } else {
        weight_product(wid.x - before, thread);
    }
}
