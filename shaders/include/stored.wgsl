// four_{{ name }}(i): elements i to i + 3 of {{ name }}, which is stored as {{ dtype }} in words of 32 bits; where it is {{ aligned }}
// that rows are whole words, i divides by 4.
fn four_{{ name }}(i: u32) -> vec4f {
$$ if dtype == "f16" and aligned
    let words = {{ name }}[i / 4u];
    return vec4f(unpack2x16float(words.x), unpack2x16float(words.y));
$$ elif dtype == "f16"
    let words = vec3u({{ name }}[i / 2u], {{ name }}[i / 2u + 1u], {{ name }}[i / 2u + 2u]);
    let halves = select(words.xy, (words.xy >> vec2u(16u)) | (words.yz << vec2u(16u)), i % 2u == 1u);
    return vec4f(unpack2x16float(halves.x), unpack2x16float(halves.y));
$$ else
    var word = {{ name }}[i / 4u];
$$ if not aligned
    let shift = i % 4u * 8u;
    if (shift > 0u) { word = (word >> shift) | ({{ name }}[i / 4u + 1u] << (32u - shift)); }
$$ endif
    return vec4f(bitcast<vec4i>(vec4u(word) << vec4u(24u, 16u, 8u, 0u)) >> vec4u(24u));
$$ endif
}
