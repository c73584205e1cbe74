// The workgroup's index in a grid made by spread(): x first, folded into y.
fn group_index(wid: vec3u, groups: vec3u) -> u32 {
    return wid.y * groups.x + wid.x;
}
