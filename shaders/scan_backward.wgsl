// From right to left, with a = exp(delta A) and w = weight: G = C dy + carry; carry = a G; P = G a h[t-1];
// du = sum over states of G w B + D dy; ddelta = sum of A P + G B u dw/ddelta; ddt = ddelta (1 - exp(-delta));
// partials = [carry after each segment | dB = G w u and dC = dy h, summed over the workgroup's channels | dA_log, dD over the segment's steps];
// where asked for, what is carried out of the first segment takes the place of what was carried into it
{$ include "include/scan.wgsl" $}
$$ set blocks = ceil_div(d_inner, channels)
$$ set starts = chunk // kept

{$ include "include/softplus_slope.wgsl" $}

// Where dB (first half) and dC of step t, summed over this workgroup's channels, are stored.
fn partial_row(batch_index: u32, block: u32, t: u32, row: u32) -> u32 {
    return {{ carried // 4 }}u + ((batch_index * seqlen + t) * {{ blocks }}u + block) * {{ 2 * groups }}u + row % {{ 2 * groups }}u;
}

$$ if wide
{$ include "include/scan_backward_subgroup.wgsl" $}
$$ else
{$ include "include/scan_backward_lanes.wgsl" $}
$$ endif
