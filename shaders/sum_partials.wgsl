// grads[first + i] += sum over parts p, in a fixed order, of partials[start + p * stride + i]
$$ set at = namespace(group=0)
{$ include "include/group_index.wgsl" $}

struct Segment {
    start: u32,
    parts: u32,
    stride: u32,
    size: u32,
    first: u32,
    group: u32,  // the workgroup that has its first elements
    wide: bool,
}

fn own_segment(group: u32) -> Segment {
$$ for start, parts, size, first in segments
$$ set wide = size >= wide_from
    if (group < {{ at.group + ceil_div(size, 4 * workgroup if wide else workgroup // slices) }}u) {
        return Segment({{ start }}u, {{ parts }}u, {{ ceil_div(size, 64) * 64 }}u, {{ size }}u, {{ first }}u, {{ at.group }}u, {{ "true" if wide else "false" }});
    }
$$ set at.group = at.group + ceil_div(size, 4 * workgroup if wide else workgroup // slices)
$$ endfor
    return Segment(0u, 0u, 0u, 0u, 0u, group, true);
}

// A long segment: a lane sums four neighbours, 4 parts at a time so that their loads overlap.
fn sum_wide(own: Segment, i: u32) {
    if (i >= own.size) { return; }
    var sum = vec4f();
    let stride = own.stride / 4u;
    var at = (own.start + i) / 4u;
    var p = 0u;
    for (; p + 3u < own.parts; p += 4u) {
        let a = partials[at];
        let b = partials[at + stride];
        let c = partials[at + 2u * stride];
        let d = partials[at + 3u * stride];
        sum += (a + b) + (c + d);
        at += 4u * stride;
    }
    for (; p < own.parts; p++) {
        sum += partials[at];
        at += stride;
    }
$$ for j in range(4)
    if (i + {{ j }}u < own.size) { {{ add("grads", "own.first + i + " ~ j ~ "u", "sum." ~ "xyzw"[j]) }} }
$$ endfor
}

fn load(i: u32) -> f32 {
    return partials[i / 4u][i % 4u];
}

$$ set span = workgroup // slices
$$ if slices > 1
var<workgroup> slice_sums: array<f32, {{ workgroup }}>;
$$ endif

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let own = own_segment(group);
    if (own.wide) {
        sum_wide(own, ((group - own.group) * {{ workgroup }}u + lane) * 4u);
    }
    let i = (group - own.group) * {{ span }}u + lane % {{ span }}u;
    let mine = !own.wide && i < own.size;
    var sum = 0.0;
    if (mine) {
        // A short one: {{ slices }} lanes an element, and 8 parts at a time.
        var p = lane / {{ span }}u;
        for (; p + {{ 7 * slices }}u < own.parts; p += {{ 8 * slices }}u) {
$$ for j in range(8)
            let a{{ j }} = load(own.start + (p + {{ j * slices }}u) * own.stride + i);
$$ endfor
            sum += ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7));
        }
        for (; p < own.parts; p += {{ slices }}u) {
            sum += load(own.start + p * own.stride + i);
        }
    }
$$ if slices > 1
    slice_sums[lane] = sum;
    workgroupBarrier();
$$ for j in range(1, slices)
    sum += slice_sums[(lane + {{ j * span }}u) % {{ workgroup }}u];
$$ endfor
$$ endif
    if (mine && lane < {{ span }}u) {
        {{ add("grads", "own.first + i", "sum") }}
    }
}
