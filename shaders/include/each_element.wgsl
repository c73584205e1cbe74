// Calls element(i) for every i below {{ count }}, by a grid-stride loop.
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(global_invocation_id) gid: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = gid.x; i < {{ count }}; i += groups.x * {{ workgroup }}u) {
        element(i);
    }
}
