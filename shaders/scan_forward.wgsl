// h = exp(delta A) h + weight u B; y = sum over states of C h + D u; gy = [y silu(z) | y]; chunk_states = h at each chunk's start
{$ include "include/scan.wgsl" $}
$$ set kind, columns = ("vec4f", d_inner // 4) if wide else ("f32", d_inner)
// Stores what a step gives{{ ", of four channels" if wide }}.
fn finish(batch_index: u32, t: u32, channel: u32, value: {{ kind }}, z: {{ kind }}) {
    if (t < seqlen && channel < {{ columns }}u) {
        let i = (batch_index * seqlen + t) * {{ columns }}u + channel;
        let e = exp(-abs(z)); // never overflows
$$ if outputs == 2
        {{ store("gy", "plane" ~ (" / 4u" if wide else "") ~ " + i", "value") }}
$$ endif
        {{ store("gy", "i", "value * z * select(e, " ~ kind ~ "(1.0), z >= " ~ kind ~ "(0.0)) / (1.0 + e)") }}
    }
}

$$ if wide
{$ include "include/scan_forward_subgroup.wgsl" $}
$$ else
{$ include "include/scan_forward_lanes.wgsl" $}
$$ endif
