// cache[b, length + t, c] = qkv[b, t, n_heads * head_dim + c], length = position[b, 1], for what the cache has room for
$$ set width = 4 if "qkv" in vec4 else 1
$$ set columns = d_cache // width
$$ set count = batch * seqlen * columns
fn element(i: u32) {
    let c = i % {{ columns }}u;
    let row = i / {{ columns }}u;
    let b = row / seqlen;
    let to = position[2u * b + 1u] + row % seqlen;
    if (to < capacity) {
        cache[(b * capacity + to) * {{ columns }}u + c] = qkv[row * {{ d_qkv // width }}u + {{ (d_qkv - d_cache) // width }}u + c];
    }
}
{$ include "include/each_element.wgsl" $}
