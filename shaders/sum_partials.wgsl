// grads[first + i] += sum over parts p, in a fixed order, of partials[start + p * stride + i]
$$ set span = workgroup // slices
$$ set at = namespace(group=0)
{$ include "include/group_index.wgsl" $}

struct Segment {
    start: u32,
    parts: u32,
    stride: u32,
    size: u32,
    first: u32,
    group: u32,  // the workgroup that has its first elements
}

fn own_segment(group: u32) -> Segment {
$$ for start, parts, size, first in segments
    if (group < {{ at.group + ceil_div(size, span) }}u) {
        return Segment({{ start }}u, {{ parts }}u, {{ ceil_div(size, 64) * 64 }}u, {{ size }}u, {{ first }}u, {{ at.group }}u);
    }
$$ set at.group = at.group + ceil_div(size, span)
$$ endfor
    return Segment(0u, 0u, 0u, 0u, 0u, group);
}

$$ if slices > 1
var<workgroup> slice_sums: array<f32, {{ workgroup }}>;
$$ endif

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let own = own_segment(group);
    let i = (group - own.group) * {{ span }}u + lane % {{ span }}u;
    var sum = 0.0;
    if (i < own.size) {
        // {{ slices }} lanes an element, and 8 parts at a time: their loads overlap.
        var p = lane / {{ span }}u;
        for (; p + {{ 7 * slices }}u < own.parts; p += {{ 8 * slices }}u) {
$$ for j in range(8)
            let a{{ j }} = partials[own.start + (p + {{ j * slices }}u) * own.stride + i];
$$ endfor
            sum += ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7));
        }
        for (; p < own.parts; p += {{ slices }}u) {
            sum += partials[own.start + p * own.stride + i];
        }
    }
$$ if slices > 1
    slice_sums[lane] = sum;
    workgroupBarrier();
$$ for j in range(1, slices)
    sum += slice_sums[(lane + {{ j * span }}u) % {{ workgroup }}u];
$$ endfor
$$ endif
    if (lane < {{ span }}u && i < own.size) {
        {{ add("grads", "own.first + i", "sum") }}
    }
}
