// out = sum over chains c of s after 16 * rounds times s = s / 2 + x, from s = c
{$ include "include/group_index.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * {{ workgroup }}u + lane;
    if (i >= {{ ceil_div(n, 4) }}u) { return; }
    let value = x[i];
$$ for c in range(chains)
    var s{{ c }} = vec4f({{ c }}.0);
$$ endfor
    for (var round = 0u; round < {{ rounds }}u; round++) {
$$ for _ in range(16)
$$ for c in range(chains)
        s{{ c }} = fma(s{{ c }}, vec4f(0.5), value);
$$ endfor
$$ endfor
    }
    out[i] = s0{$ for c in range(1, chains) $} + s{{ c }}{$ endfor $};
}
